"""The request events of the last minute, kept in memory from their stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.client import Redis

from engine.protocol.events import Event, Kind
from engine.protocol.keys import Keys
from engine.protocol.messages import decode

__all__ = ["EventWindow", "Group", "percentile"]

Group = tuple[str, str]
"""(tier, tenant)."""
_BATCH = 500
_ROUNDS = 40
_FORGET_MS = 15 * 60_000


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values don't exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


@dataclass(slots=True)
class EventWindow:
    """First deliveries and ends of requests in the last `window_ms`, by tier and tenant."""

    window_ms: int
    lag_ms: int | None = None
    """Age of the oldest event not read yet; 0: all read."""
    _cursor: str = ""
    _since: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """(request, source) -> when first seen, and time since it was received there."""
    _first: deque[tuple[int, Group, float]] = field(default_factory=deque)
    _ended: deque[tuple[int, Group, int]] = field(default_factory=deque)

    def read(self, redis: Redis, keys: Keys, now_ms: int) -> None:
        """Take in what is new; begins two windows back, so that a restart shows the same figures."""
        client: Any = redis
        cursor = self._cursor or f"{now_ms - 2 * self.window_ms}"
        for _ in range(_ROUNDS):
            entries = client.xrange(keys.events, min=f"({cursor}", count=_BATCH)
            for _, fields in entries:
                for event in _events(fields):
                    self._take(event)
            if entries:
                cursor = entries[-1][0].decode()
            if len(entries) < _BATCH:
                break
        self._cursor = cursor
        unread = client.xrange(keys.events, min=f"({cursor}", count=1)
        self.lag_ms = max(0, now_ms - int(unread[0][0].split(b"-")[0])) if unread else 0
        self._forget(now_ms)

    def ttft_s(self) -> dict[Group, list[float]]:
        """Times to first token of requests whose first token went out in the window."""
        groups: dict[Group, list[float]] = {}
        for _, group, seconds in self._first:
            groups.setdefault(group, []).append(seconds)
        return groups

    def ended(self) -> dict[Group, tuple[int, int]]:
        """(requests, tokens) that ended in the window."""
        groups: dict[Group, tuple[int, int]] = {}
        for _, group, tokens in self._ended:
            requests, total = groups.get(group, (0, 0))
            groups[group] = (requests + 1, total + tokens)
        return groups

    def _take(self, event: Event) -> None:
        key, group = (event.request, event.source), (event.tier, event.tenant)
        if event.kind == Kind.RECEIVED:
            if event.attributes.get("stream", True):  # an answer in one piece has no first token of its own
                self._since[key] = (event.at_ms, 0.0)
            return
        if key in self._since:
            at_ms, seconds = self._since[key]
            self._since[key] = (at_ms, seconds + event.since_s)
        if event.kind == Kind.FIRST_SENT and key in self._since:
            self._first.append((event.at_ms, group, self._since[key][1]))
        elif event.kind == Kind.LAST_SENT:
            tokens = event.attributes.get("tokens")
            self._ended.append((event.at_ms, group, int(tokens or 0)))
            self._since.pop(key, None)
        elif event.kind == Kind.REFUSED:
            self._since.pop(key, None)

    def _forget(self, now_ms: int) -> None:
        oldest = now_ms - self.window_ms
        # Events of several gateways are nearly, not exactly, in order of time: rebuild instead of popping the left end.
        self._first = deque(x for x in self._first if x[0] >= oldest)
        self._ended = deque(x for x in self._ended if x[0] >= oldest)
        self._since = {key: x for key, x in self._since.items() if x[0] >= now_ms - _FORGET_MS}


def _events(fields: dict[bytes, bytes]) -> list[Event]:
    try:
        return decode(fields.get(b"e", b""), list[Event])
    except msgspec.MsgspecError:
        return []
