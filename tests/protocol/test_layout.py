"""State of another layout is refused by every process that would work on it, and left as it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.protocol.functions import LAYOUT, Functions, LayoutMismatch
from engine.protocol.keys import Keys
from tests.api.test_chat import ASK
from tests.api.test_errors import check
from tests.harness import Gateway, Stack
from tests.protocol.conftest import ClockedFunctions
from tests.serve.conftest import EngineProcess


class OtherVersion(Functions):
    """A later release that kept the layout: the same acts under another library name."""

    library = f"{Functions.library}_later"


def dump(redis: Any, prefix: str) -> dict[bytes, bytes]:
    return {key: redis.dump(key) for key in redis.scan_iter(f"{prefix}*", count=1000)}


def test_the_first_call_writes_the_layout_and_another_version_of_it_goes_on(redis: Any, redis_prefix: str) -> None:
    keys = Keys(redis_prefix)
    first, later = Functions(redis, keys), OtherVersion(redis, keys)
    first.check_layout()
    assert first.register("m", "e1", "hash", b"card") == "ok"
    assert redis.get(keys.layout) == LAYOUT.encode()
    later.check_layout()
    assert later.register("m", "e2", "hash", b"card") == "ok"
    assert first.pull("m", "e1", {"standard": 1}).registered


def test_no_function_touches_another_layout(functions: ClockedFunctions) -> None:
    redis, keys = functions.redis, functions.keys
    functions.register("m", "e1", "hash", b"card")
    redis.set(keys.layout, "999")
    before = dump(redis, keys.prefix)
    calls = [
        lambda: functions.check_layout(),
        lambda: functions.register("m", "e2", "hash", b"card"),
        lambda: functions.pull("m", "e1", {"standard": 1}),
        lambda: functions.reap(),
        lambda: functions.renew("gw"),
        lambda: functions.account("alpha", 1, 5, 1),
        lambda: functions.close("r", "alpha", None, 1),
    ]
    for call in calls:
        with pytest.raises(LayoutMismatch, match=r"has layout 999, and this Sluice works with layout"):
            call()
    assert dump(redis, keys.prefix) == before


def test_state_from_before_the_number_has_layout_1(functions: ClockedFunctions) -> None:
    functions.register("m", "e1", "hash", b"card")
    functions.redis.delete(functions.keys.layout)
    if LAYOUT == "1":
        assert functions.pull("m", "e1", {}).registered
    else:
        with pytest.raises(LayoutMismatch, match="has layout 1"):
            functions.pull("m", "e1", {})
    assert functions.redis.get(functions.keys.layout) == b"1"


@pytest.fixture
def foreign(redis: Redis, redis_prefix: str) -> str:
    """A prefix whose state another version has written."""
    redis.set(Keys(redis_prefix).layout, "999")
    return redis_prefix


def test_an_engine_refuses_to_start(foreign: str, redis_url: str, redis: Any, tmp_path: Path) -> None:
    engine = EngineProcess(redis_url, foreign, "demo", "e0", tmp_path, ())
    try:
        assert engine.wait() == 3
    finally:
        engine.stop()
    (told,) = [line["detail"] for line in engine.log if line["event"] == "refused"]
    assert "has layout 999" in told and "docs/operations.md" in told
    assert set(dump(redis, foreign)) == {f"{foreign}layout".encode()}


def test_a_gateway_refuses_to_start(stack: Stack, foreign: str, redis: Any) -> None:
    with pytest.raises(RuntimeError, match="has layout 999"):
        stack.gateway(SLUICE_REDIS_PREFIX=foreign)
    assert set(dump(redis, foreign)) == {f"{foreign}layout".encode()}


@pytest.fixture
def layout_of(gateway: Gateway) -> Iterator[Any]:
    """Writes the layout under a running stack; put back afterwards."""
    key = Keys(gateway.stack.prefix).layout
    yield lambda number: gateway.stack.redis.set(key, number)
    gateway.stack.redis.set(key, LAYOUT)


def test_a_running_gateway_whose_redis_another_version_took_refuses_work_until_it_is_back(
    gateway: Gateway, client: httpx.Client, layout_of: Any
) -> None:
    engines = [p.child for p in gateway.stack.processes if p.log.name.startswith("engine") and p.child.poll() is None]
    for engine in engines:
        os.kill(engine.pid, signal.SIGSTOP)  # it would end itself, and other tests need it
    try:
        layout_of("999")
        check(client.post("/chat/completions", json=ASK), 503, "backend_unavailable")
        layout_of(LAYOUT)
    finally:
        for engine in engines:
            os.kill(engine.pid, signal.SIGCONT)
    assert client.post("/chat/completions", json=ASK).status_code == 200
