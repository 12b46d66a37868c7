"""The embedded servers, through the addresses the rest of the product uses."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
import pytest
import redis as redis_module
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.client import Redis
from redis.retry import Retry


def test_postgres_is_utf8_builtin_and_scram(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute(
            "SELECT datlocprovider, datlocale, pg_encoding_to_char(encoding) FROM pg_database WHERE datname = 'sluice'"
        ).fetchone()
        assert row == ("b", "C.UTF-8", "UTF8")
        stored = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'sluice'").fetchone()
        assert stored is not None and stored[0].startswith("SCRAM-SHA-256$")
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


def test_postgres_refuses_a_wrong_password(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    wrong = postgres_url.replace(f":{parts.password}@", ":wrong@")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)


def test_valkey_keeps_what_it_acknowledged_and_never_evicts(redis: Redis) -> None:
    wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "port": "0"}
    assert redis.config_get(*wanted) == wanted


def test_valkey_refuses_the_default_user_and_administration(redis: Redis, redis_url: str) -> None:
    path = urlsplit(redis_url).path
    with pytest.raises(redis_module.AuthenticationError):
        redis_module.Redis(unix_socket_path=path, retry=Retry(NoBackoff(), 0)).ping()
    with pytest.raises(redis_module.exceptions.NoPermissionError):
        redis.config_set("dir", "/tmp")


async def test_async_client_and_prefix(aredis: AsyncRedis, redis: Redis, redis_prefix: str) -> None:
    await aredis.set(f"{redis_prefix}x", "1")
    assert redis.get(f"{redis_prefix}x") == b"1"


def test_sockets_and_data_are_private(postgres_url: str, redis_url: str) -> None:
    sockets = Path(unquote(urlsplit(postgres_url).query.removeprefix("host=")))
    folders = [sockets, Path(urlsplit(redis_url).path).parent, sockets.parent / "pg/data", sockets.parent / "vk/data"]
    for folder in folders:
        found = folder.stat()
        assert stat.S_IMODE(found.st_mode) == 0o700, folder
        assert found.st_uid == (os.geteuid() or 65534), folder
