"""A short memory beside the latest snapshot: enough for sparklines, and to notice an engine that vanished."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from frontend.snapshot import EngineLine, Snapshot

__all__ = ["OUTAGE_IS_NEWS_MS", "History"]

POINTS = 60
LOST_ENGINE_KEPT_MS = 10 * 60 * 1000
OUTAGE_IS_NEWS_MS = 60 * 1000
_ORDERLY = {"draining", "stopped"}
"""An engine last heard in one of these states left on purpose; its absence is no outage."""

Series = deque[tuple[int, float | None]]


@dataclass(slots=True)
class History:
    """Series of (snapshot time in ms, value or None) and the last heartbeat of every engine heard of."""

    tiers: dict[str, Series] = field(default_factory=dict)
    tenants: dict[tuple[str, str], Series] = field(default_factory=dict)
    engines: dict[str, EngineLine] = field(default_factory=dict)

    def add(self, snapshot: Snapshot) -> None:
        """Take in one snapshot: time to first token by tier and tenant, heartbeats by engine."""
        present: set[tuple[str, str]] = set()
        for tier in snapshot.tiers:
            self.tiers.setdefault(tier.tier, deque(maxlen=POINTS)).append((snapshot.at_ms, tier.ttft_p95_ms))
            for line in tier.tenants:
                name = (tier.tier, line.tenant)
                present.add(name)
                self.tenants.setdefault(name, deque(maxlen=POINTS)).append((snapshot.at_ms, line.ttft_p95_ms))
        for gone in self.tenants.keys() - present:
            del self.tenants[gone]
        for engine in snapshot.engines:
            self.engines[engine.engine] = engine
        oldest = snapshot.at_ms - LOST_ENGINE_KEPT_MS
        self.engines = {name: engine for name, engine in self.engines.items() if engine.at_ms >= oldest}

    def lost(self, snapshot: Snapshot) -> list[EngineLine]:
        """Engines that were heard of, are in the snapshot no more and did not leave on purpose, with their age now.

        One that a later engine of its pool replaced is shown only as long as its end is news.
        """
        here = {engine.engine for engine in snapshot.engines}
        starts = sorted((engine.started_ms, engine.pool) for engine in self.engines.values())
        lost = []
        for engine in sorted(self.engines.values(), key=lambda engine: (engine.at_ms, engine.engine)):
            if engine.engine in here or engine.state in _ORDERLY:
                continue
            heir = next((start for start in starts if start[1] == engine.pool and start[0] >= engine.at_ms), None)
            if heir is not None:
                starts.remove(heir)
                if snapshot.at_ms - engine.at_ms > OUTAGE_IS_NEWS_MS:
                    continue
            lost.append(_aged(engine, snapshot.at_ms))
        return lost


def _aged(engine: EngineLine, now_ms: int) -> EngineLine:
    return msgspec.structs.replace(engine, age_ms=max(0, now_ms - engine.at_ms))
