"""The engine that only keeps time behind a real gateway: every token of every stream, ends, and clients that leave."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from engine.paced.queue import QueueFace
from gateway.bench.lean import Front, hold_idle, steady
from tests.admission.test_limits import open_requests, until
from tests.harness import Gateway, Stack


@pytest.fixture(scope="module")
def front(stack: Stack, gateway: Gateway) -> Iterator[Front]:
    face = QueueFace(stack.environment["REDIS_URL"], stack.prefix, "paced-test")
    face.start()
    yield Front("sluice", gateway.base, stack.keys["alpha"])
    face.stop()
    assert not face.failed


async def test_streams_come_whole_and_not_before_their_time(stack: Stack, front: Front) -> None:
    await until(lambda: stack.redis.zcard(f"{stack.prefix}engines:paced") == 1, 10.0)
    until_s = time.perf_counter() + 1.0
    found = await steady(front, streams=40, prompt="pace 50 40", tokens=8, until=until_s, spread_s=0.1, pause_s=0.02)
    assert not {s.wrong for s in found if s.wrong}
    whole = [s for s in found if s.done]
    assert len(whole) >= 40 and all(len(s.tokens_s) == 8 and s.tokens_s[0] - s.sent_s >= 0.049 for s in whole)
    await until(lambda: open_requests(stack, "alpha") == 0)  # those that the end cut off were cancelled


async def test_an_idle_stream_is_held_until_its_client_leaves(stack: Stack, front: Front) -> None:
    close = await hold_idle(front, 5)
    assert open_requests(stack, "alpha") == 5
    close()
    await until(lambda: open_requests(stack, "alpha") == 0)
