"""Tokens a second by tier and tenant, from the counters in the engines' heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.protocol.messages import Heartbeat
from gateway.metering.window import Group

__all__ = ["TokenRates"]

_SPAN_MS = 10_000
_LONGEST_GAP_MS = 5_000
"""An engine that was silent for longer has no rate: its last one would look alive."""


@dataclass(slots=True)
class TokenRates:
    """Growth of each engine's counters over the last seconds."""

    _beats: dict[tuple[str, int], deque[Heartbeat]] = field(default_factory=dict)
    """By engine and start: a restarted engine counts from nothing."""

    def take(self, engines: Iterable[Heartbeat], now_ms: int) -> None:
        """Take in the latest heartbeats; old ones go."""
        for beat in engines:
            beats = self._beats.setdefault((beat.engine, beat.started_ms), deque())
            if not beats or beat.at_ms > beats[-1].at_ms:
                beats.append(beat)
        for key, beats in list(self._beats.items()):
            while len(beats) > 1 and now_ms - beats[0].at_ms > _SPAN_MS:
                beats.popleft()
            if now_ms - beats[-1].at_ms > _LONGEST_GAP_MS:
                del self._beats[key]

    def rates(self) -> dict[Group, float]:
        """Output tokens a second of every group that ever had one; 0.0 where none came lately."""
        found: dict[Group, float] = {}
        for beats in self._beats.values():
            first, last = beats[0], beats[-1]
            seconds = (last.at_ms - first.at_ms) / 1000
            for name, made in last.made.items():
                tier, _, tenant = name.partition(":")
                grown = (made - first.made.get(name, 0)) / seconds if seconds > 0 else 0.0
                found[tier, tenant] = found.get((tier, tenant), 0.0) + grown
        return found
