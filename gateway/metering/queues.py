"""What waits and what runs right now, read from the queue's own state in Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.client import Redis

from engine.protocol.keys import Keys
from engine.protocol.messages import Heartbeat, decode
from gateway.metering.window import Group

__all__ = ["Queues", "read"]


@dataclass(slots=True)
class Queues:
    """Counts by (tier, tenant), admission times of the oldest waiting ones, and the engines' last heartbeats."""

    queued: Counter[Group] = field(default_factory=Counter)
    oldest_ms: dict[Group, int] = field(default_factory=dict)
    running: Counter[Group] = field(default_factory=Counter)
    engines: list[Heartbeat] = field(default_factory=list)


def read(redis: Redis, keys: Keys, tiers: Sequence[str]) -> Queues:
    """Four pipelines, whatever the number of pools, tenants and requests."""
    client: Any = redis
    pools = sorted(pool.decode() for pool in client.hkeys(keys.pools))
    queues = Queues()
    engines = _depths(client, keys, pools, queues)
    heads = [(pool, tier) for pool in pools for tier in tiers]
    pipe = client.pipeline(transaction=False)
    for engine in engines:
        pipe.get(keys.engine(engine))
        pipe.smembers(keys.engine_requests(engine))
    for pool, tier in heads:
        pipe.zrange(keys.ready(pool, tier), 0, -1, withscores=True)
    answers = pipe.execute()
    split = 2 * len(engines)
    queues.engines = [beat for raw in answers[:split:2] if (beat := _heartbeat(raw)) is not None]
    running = [request.decode() for requests in answers[1:split:2] for request in requests]
    members = [
        (pool, tier, member.decode(), int(score))
        for (pool, tier), ready in zip(heads, answers[split:], strict=True)
        for member, score in ready
    ]
    _running(client, keys, running, queues)
    _oldest(client, keys, members, queues)
    return queues


def _depths(client: Any, keys: Keys, pools: Sequence[str], queues: Queues) -> list[str]:
    """Queue depths of all pools; returns the ids of their engines."""
    pipe = client.pipeline(transaction=False)
    for pool in pools:
        pipe.hgetall(keys.depth(pool))
        pipe.zrange(keys.engines(pool), 0, -1)
    answers = pipe.execute()
    for depth in answers[::2]:
        for name, count in depth.items():
            tier, colon, tenant = name.decode().partition(":")
            if colon:
                queues.queued[tier, tenant] += int(count)
    return sorted({engine.decode() for members in answers[1::2] for engine in members})


def _running(client: Any, keys: Keys, requests: Iterable[str], queues: Queues) -> None:
    pipe = client.pipeline(transaction=False)
    for request in requests:
        pipe.hmget(keys.request(request), "state", "tier", "tenant")
    for state, tier, tenant in pipe.execute():
        if state == b"running":
            queues.running[tier.decode(), tenant.decode()] += 1


def _oldest(client: Any, keys: Keys, members: Sequence[tuple[str, str, str, int]], queues: Queues) -> None:
    """The head of each queue begins at the score of its member in `ready` (an arrival number)."""
    pipe = client.pipeline(transaction=False)
    for pool, tier, member, score in members:
        pipe.xrange(keys.queue(pool, tier, member), min=f"{score}-0", count=1)
    heads = [entries[0][1].get(b"r", b"").decode() for entries in pipe.execute() if entries]
    pipe = client.pipeline(transaction=False)
    for request in heads:
        pipe.hmget(keys.request(request), "tier", "tenant", "admitted")
    for tier_raw, tenant_raw, admitted in pipe.execute():
        if admitted is not None:
            group = (tier_raw.decode(), tenant_raw.decode())
            queues.oldest_ms[group] = min(int(admitted), queues.oldest_ms.get(group, int(admitted)))


def _heartbeat(raw: bytes | None) -> Heartbeat | None:
    if raw is None:
        return None
    try:
        return decode(raw, Heartbeat)
    except msgspec.MsgspecError:
        return None
