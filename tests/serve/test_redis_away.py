"""Redis stops, stalls and comes back under a running engine. This module has a server of its own to do it to."""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from gateway.local.lifeline import server_owner
from gateway.local.valkey import ValkeyServer
from tests.serve.conftest import EngineProcess, Gateway, wait_for


@pytest.fixture
def server() -> Iterator[ValkeyServer]:

    folder = Path(tempfile.mkdtemp(prefix="sluice-away-"))
    folder.chmod(0o711)
    server = ValkeyServer(folder / "vk", folder / "s", secrets.token_hex(8), folder / "log", server_owner())
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pair(server: ValkeyServer, tmp_path: Path) -> Iterator[tuple[EngineProcess, Gateway]]:
    """An engine and a gateway on that server; the gateway's client waits for a server that restarts."""
    redis = Redis.from_url(server.url, retry=Retry(ConstantBackoff(0.05), 100))
    engine = EngineProcess(server.url, "t:", "demo", "e1", tmp_path, ("--simulate", "decode_tps=50,prefill_tps=0"))
    wait_for(lambda: redis.zscore("t:engines:demo", "e1") is not None, 15)
    yield engine, Gateway(redis, "t:", "demo")
    engine.stop()
    redis.close()


def started(gateway: Gateway, request: str) -> None:
    gateway.read(lambda: any(d.tokens for d in gateway.answers[request].deltas))


def test_a_restart_of_redis_loses_no_token(server: ValkeyServer, pair: tuple[EngineProcess, Gateway]) -> None:
    engine, gateway = pair
    gateway.send("r1", max_tokens=150)
    started(gateway, "r1")
    time.sleep(1.1)  # appendfsync everysec: what is older than a second is on disk
    assert server.child is not None
    server.child.send_signal(signal.SIGKILL)
    server.child.wait()
    wait_for(lambda: "redis_away" in engine.events())
    server.start()
    gateway.finish("r1", timeout_s=20)
    assert len(gateway.answers["r1"].tokens()) == 150
    assert gateway.final("r1").completion_tokens == 150
    gateway.send("r2", max_tokens=3)
    gateway.finish("r2")
    assert engine.process.poll() is None


def test_a_slow_redis_does_not_stall_the_steps(server: ValkeyServer, pair: tuple[EngineProcess, Gateway]) -> None:
    _, gateway = pair
    gateway.send("r1", max_tokens=100)
    started(gateway, "r1")
    assert server.child is not None
    server.child.send_signal(signal.SIGSTOP)
    time.sleep(2.0)  # as long as the whole answer takes
    server.child.send_signal(signal.SIGCONT)
    gateway.finish("r1")
    decode_s = gateway.final("r1").timeline.decode_s
    assert decode_s is not None and decode_s < 3.5, "2 s of tokens; waiting for Redis would have made it 4 s"
    assert len(gateway.answers["r1"].tokens()) == 100


def test_an_engine_waits_for_a_redis_that_is_not_there_yet(server: ValkeyServer, tmp_path: Path) -> None:
    server.stop()
    engine = EngineProcess(server.url, "t:", "demo", "e1", tmp_path, ())
    try:
        wait_for(lambda: "redis_away" in engine.events(), 15)
        server.start()
        wait_for(lambda: "registered" in engine.events())
        engine.signal()
        assert engine.wait() == 0
    finally:
        engine.stop()
