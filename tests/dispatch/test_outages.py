"""Redis or Postgres away: who still works, who gets which error, and that all is well again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from gateway.local.lifeline import server_owner
from gateway.local.valkey import ValkeyServer
from tests.admission.test_limits import open_requests, start, until
from tests.api.test_chat import ASK, ask
from tests.api.test_errors import check
from tests.harness import Gateway, Stack, events
from tests.harness import stack as run_stack


@contextlib.contextmanager
def no_database(stack: Stack, server_url: str) -> Iterator[None]:
    """Its connections are cut and new ones refused."""
    name = stack.database_url.partition("?")[0].rpartition("/")[2]
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')  # type: ignore[arg-type]
        server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')  # type: ignore[arg-type]


def test_without_postgres_known_keys_go_on_and_unknown_ones_wait(gateway: Gateway, postgres_url: str) -> None:
    with gateway.client("alpha") as known, gateway.client("never-seen") as fresh:
        assert ask(known).status_code == 200
        with no_database(gateway.stack, postgres_url):
            for _ in range(3):
                assert ask(known).status_code == 200
            response = ask(fresh)
            check(response, 503, "identity_unavailable")
            assert response.headers["retry-after"] and response.headers["x-should-retry"] == "true"
        assert ask(fresh).status_code == 200


@pytest.fixture
def own_valkey(tmp_path: Path, postgres_url: str) -> Iterator[ValkeyServer]:
    """A Valkey that may be killed: the session's is shared."""
    folder = Path("/tmp") / f"sv-{secrets.token_hex(4)}"  # a socket's path must be short
    folder.mkdir(mode=0o711)
    server = ValkeyServer(folder / "vk", folder / "vks", secrets.token_hex(16), tmp_path / "valkey.log", server_owner())
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
async def test_redis_is_killed_and_comes_back(own_valkey: ValkeyServer, tmp_path: Path, postgres_url: str) -> None:
    with run_stack(tmp_path, postgres_url, own_valkey.url) as stack:
        stack.engine("decode_tps=20,prefill_tps=0")
        gateway = stack.gateway()
        async with gateway.async_client() as client:
            running = await start(client, max_tokens=120)
            assert own_valkey.child is not None
            own_valkey.child.send_signal(signal.SIGKILL)
            own_valkey.child.wait(5)
            async with asyncio.timeout(12):
                check(await client.post("/chat/completions", json=ASK), 503, "backend_unavailable")
                assert (await client.get("/models")).status_code == 200
                await asyncio.sleep(1.1)  # the list of models is no longer fresh
                check(await client.post("/chat/completions", json=ASK), 503, "backend_unavailable")
                assert (await client.get("/models")).status_code == 200
            own_valkey.start()
            async with asyncio.timeout(20):
                body = (await running.aread()).decode()
                last = events(body)[-1]
                assert "[DONE]" in body or last["error"]["code"] in ("queue_lost", "engine_lost"), last
                while (await client.post("/chat/completions", json=ASK)).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            await until(lambda: open_requests(stack, "alpha") == 0, 5)
