"""The live view: one JSON snapshot a second of what waits, runs and was promised. A figure nobody knows is null."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import orjson
from django.db import DatabaseError, connection
from redis.client import Redis

from engine.protocol.keys import Keys
from engine.protocol.messages import Heartbeat
from gateway.metering import facts as record
from gateway.metering import queues
from gateway.metering.facts import Facts
from gateway.metering.queues import Queues
from gateway.metering.rates import TokenRates
from gateway.metering.window import EventWindow, Group, percentile
from tenants.models import Tier

__all__ = ["WINDOW_S", "Live"]

WINDOW_S = 60
_KEEP_MS = 10_000
"""A snapshot outlives its writer by this: afterwards there is none, rather than an old one that looks live."""


@dataclass(frozen=True, slots=True)
class _View:
    """Everything one snapshot is made of. `facts` is None while Postgres is away."""

    now_ms: int
    queues: Queues
    facts: Facts | None
    ttft_s: dict[Group, list[float]]
    ended: dict[Group, tuple[int, int]]
    rates: dict[Group, float]


class Live:
    """Makes and publishes snapshots; used by one thread."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._window = EventWindow(WINDOW_S * 1000)
        self._rates = TokenRates()
        self._tiers: list[Tier] = []

    def publish(self) -> bytes:
        """One snapshot, kept for whoever asks and pushed to whoever listens."""
        snapshot = orjson.dumps(self.snapshot(int(time.time() * 1000)))
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(self._keys.live, snapshot, px=_KEEP_MS)
        pipe.publish(self._keys.live, snapshot)
        pipe.execute()
        return snapshot

    def snapshot(self, now_ms: int) -> dict[str, Any]:
        """The snapshot as plain values."""
        self._window.read(self._redis, self._keys, now_ms)
        facts = self._facts(now_ms)
        waiting = queues.read(self._redis, self._keys, [tier.name for tier in self._tiers])
        self._rates.take(waiting.engines, now_ms)
        view = _View(now_ms, waiting, facts, self._window.ttft_s(), self._window.ended(), self._rates.rates())
        return {
            "at_ms": now_ms,
            "window_s": WINDOW_S,
            "money_since_ms": int(facts.day.timestamp() * 1000) if facts else None,
            "tiers": [_tier(view, tier) for tier in self._tiers],
            "engines": [_engine(beat, now_ms) for beat in waiting.engines],
            "events_lag_ms": self._window.lag_ms,
        }

    def _facts(self, now_ms: int) -> Facts | None:
        try:
            facts = record.load(datetime.fromtimestamp(now_ms / 1000, UTC), timedelta(seconds=WINDOW_S))
        except DatabaseError:
            connection.close()
            return None
        self._tiers = facts.tiers
        return facts


def _tier(view: _View, tier: Tier) -> dict[str, Any]:
    known = set(view.facts.names) if view.facts else set()
    sources: Sequence[Iterable[Group]] = (
        view.queues.queued,
        view.queues.running,
        view.ttft_s,
        view.ended,
        view.facts.money if view.facts else (),
        view.facts.verdicts if view.facts else (),
    )
    groups = sorted({g for source in sources for g in source if g[0] == tier.name and (g[1] in known or not known)})
    line = _figures(view, groups)
    # The currency of a tier is that of its money; tenants of several currencies are not added up.
    currencies = {view.facts.money[g][1] for g in groups if g in view.facts.money} if view.facts else set()
    return {
        "tier": tier.name,
        "rank": tier.rank,
        "ttft_target_ms": tier.ttft_ms,
        "tpot_target_ms": tier.tpot_ms,
        **line,
        "money": line["money"] if len(currencies) <= 1 else None,
        "currency": currencies.pop() if len(currencies) == 1 else None,
        "tenants": [_tenant(view, group) for group in groups],
    }


def _tenant(view: _View, group: Group) -> dict[str, Any]:
    name = view.facts.names.get(group[1], group[1]) if view.facts else group[1]
    return {
        "tenant": group[1],
        "name": name,
        **_figures(view, [group]),
        "requests": view.ended.get(group, (0, 0))[0],
    }


def _figures(view: _View, groups: Sequence[Group]) -> dict[str, Any]:
    """The figures of some (tier, tenant) groups together."""
    oldest = [view.queues.oldest_ms[g] for g in groups if g in view.queues.oldest_ms]
    p95 = percentile((s for g in groups for s in view.ttft_s.get(g, ())), 0.95)
    return {
        "queued": sum(view.queues.queued[g] for g in groups),
        "oldest_wait_s": max(0, view.now_ms - min(oldest)) / 1000 if oldest else None,
        "running": sum(view.queues.running[g] for g in groups),
        "tokens_per_s": _tokens_per_s(view, groups),
        "ttft_p95_ms": None if p95 is None else p95 * 1000,
        "compliance": _compliance(view, groups),
        "money": _money(view, groups),
    }


def _tokens_per_s(view: _View, groups: Sequence[Group]) -> float | None:
    """As the engines' counters grow; where no engine counts, tokens of the requests that ended, over the window."""
    rates = [view.rates[g] for g in groups if g in view.rates]
    if rates:
        return sum(rates)
    ended = [view.ended[g] for g in groups if g in view.ended]
    return sum(tokens for _, tokens in ended) / WINDOW_S if ended else None


def _compliance(view: _View, groups: Sequence[Group]) -> float | None:
    if view.facts is None:
        return None
    pairs = [view.facts.verdicts[g] for g in groups if g in view.facts.verdicts]
    total = sum(finished for _, finished in pairs)
    return sum(good for good, _ in pairs) / total if total else None


def _money(view: _View, groups: Sequence[Group]) -> str | None:
    if view.facts is None:
        return None
    amounts = [view.facts.money[g][0] for g in groups if g in view.facts.money]
    return f"{sum(amounts, Decimal(0)):f}" if amounts else None


def _engine(beat: Heartbeat, now_ms: int) -> dict[str, Any]:
    return {**msgspec.to_builtins(beat), "age_ms": max(0, now_ms - beat.at_ms)}
