"""Admissions that share a connection get each its own answer, whatever happens to the others and to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import RedisError

from engine.protocol.functions import Admission, AsyncFunctions, Functions
from engine.protocol.keys import Keys
from gateway.dispatch.admitter import Admitter
from gateway.dispatch.redis import connect


def _admission(request: str, **changes: Any) -> Admission:
    facts: dict[str, Any] = {
        "request": request, "tenant": "alpha", "pool": "m", "tier": "standard", "tier_rank": 1, "gateway": "g1",
        "generation": 1, "hold_nano": 0, "floor_nano": None, "max_concurrent": -1, "max_queued_tier": -1,
        "max_queued_tenant": -1, "choices": 1, "prompt_tokens": 5, "lease_ms": 10_000,
    }  # fmt: skip
    return Admission(**(facts | changes))


@pytest.fixture
def keys(redis: Any, redis_prefix: str) -> Keys:
    keys = Keys(redis_prefix)
    assert Functions(redis, keys).register("m", "e1", "hash", b"card", 10_000) == "ok"
    return keys


def _run(redis_url: str, keys: Keys, test: Callable[[Admitter], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        redis = connect(redis_url, timeout_s=1.0)
        admitter = Admitter(redis, AsyncFunctions(redis, keys))
        try:
            return await test(admitter)
        finally:
            admitter.close()
            await redis.aclose()

    return asyncio.run(run())


def test_each_of_a_burst_gets_its_own_verdict(redis_url: str, keys: Keys, redis: Any) -> None:
    async def burst(admitter: Admitter) -> Any:
        pools = ["nobody's" if i % 7 == 3 else "m" for i in range(100)]
        asked = [admitter.admit(_admission(f"r{i}", pool=pool), b"w") for i, pool in enumerate(pools)]
        return pools, await asyncio.gather(*asked)

    pools, verdicts = _run(redis_url, keys, burst)
    assert [v.code for v in verdicts] == ["ok" if pool == "m" else "no_engine" for pool in pools]
    depths = [v.depth for v in verdicts if v.ok]
    assert sorted(depths) == list(range(1, len(depths) + 1))
    assert redis.scard(keys.gateway_requests("g1")) == pools.count("m")


def test_a_server_that_lost_the_library_is_given_it(redis_url: str, keys: Keys, redis: Any) -> None:
    redis.function_delete(Functions.library)
    verdicts = _run(redis_url, keys, lambda a: asyncio.gather(*[a.admit(_admission(f"r{i}"), b"w") for i in range(40)]))
    assert [v.code for v in verdicts] == ["ok"] * 40
    assert redis.scard(keys.gateway_requests("g1")) == 40


def test_one_who_leaves_takes_nobody_along(redis_url: str, keys: Keys) -> None:
    async def some_leave(admitter: Admitter) -> Any:
        asked = [admitter.admit(_admission(f"r{i}"), b"w") for i in range(60)]
        for future in asked[::3]:
            future.cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = _run(redis_url, keys, some_leave)
    assert all(isinstance(o, asyncio.CancelledError) for o in outcomes[::3])
    assert all(o.ok for i, o in enumerate(outcomes) if i % 3)


def test_without_redis_all_are_told(keys: Keys) -> None:
    outcomes = _run(
        "redis://127.0.0.1:1/0",
        keys,
        lambda a: asyncio.gather(*[a.admit(_admission(f"r{i}"), b"w") for i in range(40)], return_exceptions=True),
    )
    assert all(isinstance(o, RedisError | OSError) for o in outcomes)


def test_a_cut_connection_is_mended_unseen(redis_url: str, keys: Keys, redis: Any) -> None:
    async def cut(admitter: Admitter) -> Any:
        before = await admitter.admit(_admission("r0"), b"w")
        mine = [c["id"] for c in redis.client_list() if c["cmd"] == "fcall" and c["id"] != str(redis.client_id())]
        assert mine
        for number in mine:
            redis.client_kill_filter(_id=number)
        return [before, *await asyncio.gather(*[admitter.admit(_admission(f"r{i}"), b"w") for i in range(1, 30)])]

    assert [v.code for v in _run(redis_url, keys, cut)] == ["ok"] * 30
    assert redis.scard(keys.gateway_requests("g1")) == 30
