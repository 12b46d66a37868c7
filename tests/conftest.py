"""Every test session has a Postgres and a Valkey of its own, started by the first test that asks and gone at the end.

The environment is set when this file is imported, before Django reads its settings: the servers' addresses are known
before they run. Pure unit tests therefore cost nothing, and any number of sessions can run at the same time.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.local.lifeline import server_owner
from gateway.local.postgres import PostgresServer
from gateway.local.valkey import ValkeyServer

pytest_plugins = ["tests.stack_fixtures"]

_FOLDER = Path(tempfile.gettempdir()) / f"sluice-test-{os.getpid()}-{secrets.token_hex(3)}"
_FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off"}
"""Durability of a database that lives for one test session is worth nothing."""

_OWNER = server_owner()
_POSTGRES = PostgresServer(
    _FOLDER / "pg", _FOLDER / "pgs", secrets.token_hex(16), _FOLDER / "postgres.log", _OWNER, _FAST
)
_VALKEY = ValkeyServer(_FOLDER / "vk", _FOLDER / "vks", secrets.token_hex(16), _FOLDER / "valkey.log", _OWNER)

os.environ |= {
    "GOMP_SPINCOUNT": "0",  # threads that spin for each other make tests on a busy machine many times slower
    "DJANGO_SETTINGS_MODULE": "gateway.settings",
    "DATABASE_URL": _POSTGRES.url,
    "REDIS_URL": _VALKEY.url,
    "SLUICE_REDIS_PREFIX": "test:",
    "SLUICE_SECRET_KEY": secrets.token_urlsafe(48),
    "SLUICE_KEY_PEPPER": secrets.token_urlsafe(48),
    "SLUICE_ALLOWED_HOSTS": "testserver,localhost,127.0.0.1",
    "SLUICE_DATA_DIR": str(_FOLDER / "data"),
    "SLUICE_GATEWAY_ID": f"gw-test-{os.getpid()}",
}


def _folder() -> Path:
    """The session's folder, made on demand; what killed sessions left behind goes first."""
    if not _FOLDER.exists():
        for old in _FOLDER.parent.glob("sluice-test-*"):
            pid = old.name.split("-")[2]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(old, ignore_errors=True)
        _FOLDER.mkdir(mode=0o711)
    return _FOLDER


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Workers inherit this environment, and would read Django's settings from it before they set their own."""
    os.environ.pop("DJANGO_SETTINGS_MODULE")


def pytest_unconfigure() -> None:
    _VALKEY.stop()
    _POSTGRES.stop()
    shutil.rmtree(_FOLDER, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url() -> str:
    """Address of the running Postgres (superuser, database `sluice`; Django's test database is made beside it)."""
    if _POSTGRES.child is None:
        _folder()
        _POSTGRES.start()
    return _POSTGRES.url


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgres_url: str) -> None:
    """Called by pytest-django before it makes the test database."""


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Address of the running Valkey; the same as REDIS_URL."""
    if _VALKEY.child is None:
        _folder()
        _VALKEY.start()
    return _VALKEY.url


@pytest.fixture
def redis_prefix(redis_url: str) -> Iterator[str]:
    """A key prefix of this test's own; its keys are removed afterwards."""
    import redis

    prefix = f"t{secrets.token_hex(6)}:"
    yield prefix
    with redis.Redis.from_url(redis_url) as client:
        keys = list(client.scan_iter(match=f"{prefix}*", count=1000))
        if keys:
            client.delete(*keys)


@pytest.fixture
def redis(redis_url: str) -> Iterator[object]:
    """A blocking client (`decode_responses=False`)."""
    import redis

    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def aredis(redis_url: str) -> AsyncIterator[object]:
    """An asyncio client (`decode_responses=False`)."""
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The GGUF of smollm2-135m, fetched once into the checkout's data folder (or SLUICE_TEST_DATA_DIR)."""
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def embedding_model() -> Path:
    """The folder of all-minilm-l6-v2, fetched likewise."""
    return _pulled("all-minilm-l6-v2")


def _pulled(name: str) -> Path:
    folder = os.environ.get("SLUICE_TEST_DATA_DIR") or str(Path(__file__).resolve().parents[1] / "var")
    done = subprocess.run(
        [sys.executable, "-m", "engine.models", "pull", name, "--data-dir", folder, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["path"])
