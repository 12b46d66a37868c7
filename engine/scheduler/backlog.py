"""What waits: one stream per (tier, tenant), in arrival order. Only stream heads compete, as in the queue in front."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.scheduler.sequence import Sequence

__all__ = ["Backlog"]


class Backlog:
    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], deque[Sequence]] = {}
        self._by_tier: dict[int, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for stream in self._streams.values():
            yield from stream

    def add(self, s: Sequence) -> None:
        self._streams.setdefault((s.tier, s.tenant), deque()).append(s)
        self._by_tier[s.tier] = self._by_tier.get(s.tier, 0) + 1
        self._size += 1

    def remove(self, s: Sequence) -> None:
        stream = self._streams[s.tier, s.tenant]
        if stream[0] is s:
            stream.popleft()
        else:
            stream.remove(s)
        if not stream:
            del self._streams[s.tier, s.tenant]
        self._by_tier[s.tier] -= 1
        if not self._by_tier[s.tier]:
            del self._by_tier[s.tier]
        self._size -= 1

    def heads(self) -> list[Iterator[Sequence]]:
        """One iterator per stream; the first of each is its head."""
        return [iter(stream) for stream in self._streams.values()]

    def tiers(self) -> list[int]:
        """Tiers with anything waiting, best first."""
        return sorted(self._by_tier)

    def count(self, tier: int) -> int:
        return self._by_tier.get(tier, 0)
