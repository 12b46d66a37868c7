"""The feed on a real Redis, and the stream of events made from it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from engine.protocol.keys import Keys
from frontend import stream
from frontend.feed import LiveFeed
from frontend.snapshot import EVERYTHING, Scope

from . import sample


@pytest.fixture
async def feed(redis_url: str, redis_prefix: str) -> AsyncIterator[LiveFeed]:
    feed = LiveFeed(redis_url, Keys(redis_prefix))
    feed.start()
    yield feed
    assert feed._task is not None
    feed._task.cancel()


async def publish(aredis: Redis, prefix: str, content: dict[str, Any]) -> None:
    await aredis.publish(f"{prefix}live", json.dumps(content))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for is a flag of the code under test)
            await asyncio.sleep(0.005)


async def connected(feed: LiveFeed) -> None:
    await until(lambda: feed.connected)


async def test_the_kept_snapshot_is_there_before_the_first_push(
    aredis: Redis, redis_url: str, redis_prefix: str
) -> None:
    content = sample.snapshot()
    await aredis.set(f"{redis_prefix}live", json.dumps(content))
    feed = LiveFeed(redis_url, Keys(redis_prefix))
    feed.start()
    await feed.newer_than(0, 10)
    assert feed.latest is not None
    assert feed.latest.at_ms == content["at_ms"]
    feed._task.cancel()  # type: ignore[union-attr]


async def test_every_viewer_gets_the_newest_at_once(feed: LiveFeed, aredis: Redis, redis_prefix: str) -> None:
    await connected(feed)
    viewers = [asyncio.create_task(feed.newer_than(0, 10)) for _ in range(50)]
    await asyncio.sleep(0)
    started_s = time.monotonic()
    await publish(aredis, redis_prefix, sample.snapshot())
    await asyncio.gather(*viewers)
    assert feed.version == 1
    assert time.monotonic() - started_s < 5


async def test_a_repeated_snapshot_is_no_news_and_grows_older(feed: LiveFeed, aredis: Redis, redis_prefix: str) -> None:
    """I1: who keeps publishing the same moment can't make it look fresh, not even with a clock that is ahead."""
    await connected(feed)
    frozen = sample.snapshot(at_ms=time.time_ns() // 1_000_000 + 60_000)
    await publish(aredis, redis_prefix, frozen)
    await feed.newer_than(0, 10)
    first_s = feed.age_s
    assert first_s is not None
    assert first_s < 1
    for _ in range(3):
        await publish(aredis, redis_prefix, frozen | {"events_lag_ms": 1})
    await feed.newer_than(1, 0.3)
    assert feed.version == 1
    assert feed.age_s is not None
    assert feed.age_s >= first_s + 0.3


async def test_an_old_snapshot_is_as_old_as_it_says(feed: LiveFeed, aredis: Redis, redis_prefix: str) -> None:
    await connected(feed)
    await publish(aredis, redis_prefix, sample.snapshot(at_ms=time.time_ns() // 1_000_000 - 45_000))
    await feed.newer_than(0, 10)
    assert feed.age_s is not None
    assert 45 <= feed.age_s < 55
    assert stream.board_of(feed, EVERYTHING).stale


async def test_what_cannot_be_read_is_said_and_the_last_good_one_stays(
    feed: LiveFeed, aredis: Redis, redis_prefix: str
) -> None:
    await connected(feed)
    await publish(aredis, redis_prefix, sample.snapshot())
    await feed.newer_than(0, 10)
    await aredis.publish(f"{redis_prefix}live", b'{"at_ms": "tomorrow"}')
    await until(lambda: feed.unreadable)
    assert feed.version == 1
    assert any("can't be read" in notice for notice in stream.board_of(feed, EVERYTHING).notices)
    await publish(aredis, redis_prefix, sample.snapshot())
    await feed.newer_than(1, 10)
    assert not feed.unreadable


async def test_a_lost_connection_is_said_and_made_again(feed: LiveFeed, aredis: Redis, redis_prefix: str) -> None:
    await connected(feed)
    await publish(aredis, redis_prefix, sample.snapshot())
    await feed.newer_than(0, 10)
    ours = [client["id"] for client in await aredis.client_list() if client["sub"] == "1"]
    for client in ours:
        await aredis.client_kill_filter(_id=client)
    await until(lambda: not feed.connected)
    assert any("can't reach Redis" in notice for notice in stream.board_of(feed, EVERYTHING).notices)
    await connected(feed)
    await publish(aredis, redis_prefix, sample.snapshot())
    await feed.newer_than(1, 10)
    assert feed.version == 2


async def test_a_viewer_who_does_not_read_costs_and_delays_nothing(
    feed: LiveFeed, aredis: Redis, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: after a hundred snapshots the slow one gets one event, the newest."""
    monkeypatch.setattr(stream, "MIN_GAP_S", 0.0)
    await connected(feed)

    async def member() -> Scope:
        return EVERYTHING

    slow, quick = stream.events(feed, EVERYTHING, member), stream.events(feed, EVERYTHING, member)
    await anext(slow)
    for queued in range(1, 101):
        tiers = [sample.tier("interactive", 0, 1000, [sample.tenant("alpha", queued=queued)])]
        await publish(aredis, redis_prefix, sample.snapshot(tiers, at_ms=time.time_ns() // 1_000_000 + queued))
        await feed.newer_than(queued - 1, 10)
        await anext(quick)
    assert b'data-label="Queued" class="n">100<' in await anext(slow)


async def test_without_news_the_age_is_pushed_all_the_same(feed: LiveFeed, aredis: Redis, redis_prefix: str) -> None:
    await connected(feed)
    await publish(aredis, redis_prefix, sample.snapshot())
    await feed.newer_than(0, 10)

    async def member() -> Scope:
        return EVERYTHING

    events = stream.events(feed, EVERYTHING, member)
    await anext(events)
    started_s = time.monotonic()
    event = await anext(events)
    assert 1.0 < time.monotonic() - started_s < 5.0
    assert event.endswith(b"\n\n")
    assert all(line.startswith(b"data: ") for line in event.splitlines() if line)


async def test_a_stream_ends_with_its_session_and_follows_its_scope(
    feed: LiveFeed, aredis: Redis, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "RECHECK_S", 0.0)
    monkeypatch.setattr(stream, "PUSH_S", 0.21)
    await connected(feed)
    await publish(aredis, redis_prefix, sample.snapshot())
    await feed.newer_than(0, 10)
    answers = [Scope(staff=False, tenants=frozenset({"beta"})), None]

    async def check() -> Scope | None:
        return answers.pop(0)

    events = [event async for event in stream.events(feed, EVERYTHING, check)]
    assert b"Alpha" in events[0]
    assert b"Beta" in events[1]
    assert b"Alpha" not in events[1]
    assert events[2].startswith(b"event: console:signed-out\n")
    assert len(events) == 3
