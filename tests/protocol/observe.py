"""All that a cell's state consists of, as one comparable dict: read from Redis, and made of the twin."""

from __future__ import annotations

import json
from typing import Any

from engine.protocol.fair import FairQueue
from engine.protocol.messages import Control, Delta, Final, decode
from engine.protocol.twin import Twin

_IGNORED = ("wake:", "test_now", "layout")
_RECORD = (
    "state",
    "epoch",
    "attempts",
    "engine",
    "gateway",
    "cancel",
    "member",
    "arrival",
    "expires",
    "admitted",
    "hold",
)


def of_redis(redis: Any, prefix: str) -> dict[str, Any]:
    """Every key under the prefix but the wake lists, whose length is only a hint, and what tests of its own check."""
    state: dict[str, Any] = {}
    for key in redis.scan_iter(match=f"{prefix}*", count=1000):
        name = key.decode().removeprefix(prefix)
        if not name.startswith(_IGNORED):
            value = _read(redis, key, name)
            if value:
                state[name] = value
    return state


def _read(redis: Any, key: bytes, name: str) -> Any:
    kind = redis.type(key).decode()
    if kind == "stream":
        return _entries(name, redis.xrange(key)) or ("empty" if name.startswith("replies:") else None)
    if kind == "hash":
        fields = {k.decode(): v.decode() for k, v in redis.hgetall(key).items()}
        if name.startswith("credit:"):
            return {engine: json.loads(standing) for engine, standing in fields.items()}
        if name.startswith("req:"):
            return {f: fields.get(f, "") for f in _RECORD}
        return fields
    if kind == "zset":
        return {m.decode(): int(s) for m, s in redis.zrange(key, 0, -1, withscores=True)}
    if kind == "set":
        return sorted(m.decode() for m in redis.smembers(key))
    return redis.get(key).decode()


def _entries(name: str, entries: list[Any]) -> Any:
    fields = [f for _, f in entries]
    if name.startswith("q:"):
        return [int(entry.split(b"-")[0]) for entry, _ in entries]
    if name.startswith("replies:"):
        return [d for f in fields for d in decode(f[b"d"], list[Delta])]
    if name.startswith("ctl:"):
        return [decode(f[b"c"], Control) for f in fields]
    if name == "usage":
        return [decode(f[b"f"], Final) for f in fields]
    return [f[b"r"].decode() for f in fields]


def _real(x: float) -> str:
    return format(x, ".17g")


def _accounts(pool: str, fair: FairQueue) -> dict[str, Any]:
    asked = {f"{tier}:{name}": n for tier, active in fair.active.items() for name, n in active.items()}
    state: dict[str, Any] = {
        f"vtc:{pool}": {f"{tier}:{tenant}": str(v) for (tier, tenant), v in fair.counters.items()},
        f"deficit:{pool}": {tier: str(v) for tier, v in fair.deficits.items()},
        f"asked:{pool}": {name: str(n) for name, n in asked.items()},
        f"rows:{pool}": {tier: str(n) for tier, n in fair.rows.items()},
        f"passed:{pool}": {tier: str(n) for tier, n in fair.passed.items()},
        f"weight:{pool}": {tenant: str(w) for tenant, w in fair.weights.items()},
    }
    for tier, active in fair.active.items():
        state[f"active:{pool}:{tier}"] = {tenant: fair.counters.get((tier, tenant), 0) for tenant in active}
    return state


def _indexes(t: Twin) -> dict[str, Any]:
    """What Redis keeps beside the requests, made of the requests."""
    state: dict[str, Any] = {"expiry": {}, "grace": {}}

    def count(key: str, field: str, by: int = 1) -> None:
        fields = state.setdefault(key, {})
        fields[field] = str(int(fields.get(field, 0)) + by)

    for request, r in sorted(t.requests.items()):
        a = r.a
        if r.state == "queued":
            count(f"depth:{a.pool}", a.tier)
            count(f"depth:{a.pool}", f"{a.tier}:{a.tenant}")
            if r.expires_ms:
                state["expiry"][request] = r.expires_ms
        if a.hold_nano:
            count(f"acct:{a.tenant}", "held", a.hold_nano)
        if r.grace_ms:
            state["grace"][request] = r.grace_ms
        if r.state != "finished":
            state.setdefault(f"open:{a.tenant}", []).append(request)
            if r.gateway:
                state.setdefault(f"gwreq:{r.gateway}", []).append(request)
        if r.state == "running":
            state.setdefault(f"engreq:{r.engine}", []).append(request)
    for (pool, tier), queues in t.queues.items():
        for member, queue in queues.items():
            state[f"q:{pool}:{tier}:{member}"] = sorted(queue.entries)
            if queue.waiting:
                late = "!" if member.startswith("!") else ""
                state.setdefault(f"ready:{pool}:{tier}{late}", {})[member] = min(queue.waiting)
    return state


def of_twin(t: Twin) -> dict[str, Any]:
    """The same dict as `of_redis` gives."""
    state = _indexes(t) | {"usage": t.usage, "dead": t.dead, "era": t.era, "pools": dict(t.pools)}
    state["arrivals"] = str(t.arrivals) if t.arrivals else None
    state["gateways"], state["reaped"] = dict(t.gateways), dict(t.reaped)
    if t.tick is not None:
        state["tick"] = {"at": str(t.tick[0]), "armed": str(t.tick[1])}
    for request, kept in t.resumable.items():
        told = {"told": "1"} if kept.told else {}
        named_kept = {"tenant": kept.tenant, "gateway": kept.gateway, "turn": str(kept.turn), "ask": kept.ask}
        state[f"resume:{request}"] = named_kept | told
    for request, r in t.requests.items():
        values: list[Any] = [r.state, r.epoch, r.attempts, r.engine, r.gateway, r.cancel, r.member, r.arrival]
        values += [r.expires_ms, r.admitted_ms, r.a.hold_nano]
        state[f"req:{request}"] = dict(zip(_RECORD, map(str, values), strict=True))
    for (pool, tier), (gap, last) in t.drain.items():
        state.setdefault(f"drain:{pool}", {}).update({f"{tier}:gap": _real(gap), f"{tier}:last": str(last)})
    for (tenant, name), (level, at) in t.buckets.items():
        state[f"rl:{tenant}:{name}"] = {"level": _real(level), "at": str(at)}
    for (tenant, key), c in t.claims.items():
        text = "finished" if c.finished else "in_flight"
        state[f"idem:{tenant}:{key}"] = {
            "digest": c.digest, "request": c.request, "state": text, "expires": str(c.expires_ms)
        }  # fmt: skip
    for tenant, account in t.accounts.items():
        named = {"generation": account.generation, "balance": account.balance_nano, "sequence": account.sequence}
        state.setdefault(f"acct:{tenant}", {}).update({k: str(v) for k, v in named.items() if v is not None})
    for pool, ranks in t.tiers.items():
        state[f"tiers:{pool}"] = dict(ranks)
    for pool, fair in t.fair.items():
        state |= _accounts(pool, fair)
    state.update({f"engines:{pool}": dict(v) for pool, v in t.engines.items()})
    for pool, standing in t.standing.items():
        state[f"standing:{pool}"] = {engine: s.turn for engine, s in standing.items()}
        state[f"credit:{pool}"] = {
            engine: {"credit": s.credit, "tokens": s.tokens, "until": s.until_ms} for engine, s in standing.items()
        }
    state.update({f"card:{pool}": v.decode() for pool, v in t.cards.items()})
    state.update({f"replies:{g}": list(v) or "empty" for g, v in t.replies.items()})
    state.update({f"ctl:{e}": list(v) for e, v in t.controls.items()})
    return {k: v for k, v in state.items() if v}
