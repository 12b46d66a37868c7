"""What waits: one stream per (tier, tenant), in arrival order. Only stream heads compete, as in the queue in front.

A stream is two queues: those that can still make their deadline, and those that can't any more (relegated). Both have a
head, so that the late ones at the front of a stream don't hide those behind them who can still be served in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator

from engine.scheduler.sequence import Sequence

__all__ = ["Backlog"]


class Backlog:
    def __init__(self) -> None:
        self._queues: dict[tuple[int, str, bool], deque[Sequence]] = {}
        self._by_tier: dict[int, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def add(self, s: Sequence) -> None:
        self._queues.setdefault((s.tier, s.tenant, s.late), deque()).append(s)
        self._by_tier[s.tier] = self._by_tier.get(s.tier, 0) + 1
        self._size += 1

    def remove(self, s: Sequence) -> None:
        key = (s.tier, s.tenant, s.late)
        queue = self._queues[key]
        if queue[0] is s:
            queue.popleft()
        else:
            queue.remove(s)
        if not queue:
            del self._queues[key]
        self._by_tier[s.tier] -= 1
        if not self._by_tier[s.tier]:
            del self._by_tier[s.tier]
        self._size -= 1

    def relegate(self, late: Callable[[Sequence], bool]) -> None:
        """Move heads that can't make their deadline any more to their stream's late queue."""
        for key in [key for key, queue in self._queues.items() if not key[2] and late(queue[0])]:
            queue = self._queues[key]
            target = self._queues.setdefault((key[0], key[1], True), deque())
            while queue and late(queue[0]):
                queue[0].late = True
                target.append(queue.popleft())
            if not queue:
                del self._queues[key]

    def heads(self, tiers: Container[int]) -> list[Iterator[Sequence]]:
        """One iterator per queue of these tiers; the first of each is its head."""
        return [iter(queue) for key, queue in self._queues.items() if key[0] in tiers]

    def oldest(self, tier: int) -> int:
        """Number of the longest-waiting sequence of a tier."""
        return min(queue[0].number for key, queue in self._queues.items() if key[0] == tier)

    def tiers(self) -> list[int]:
        """Tiers with anything waiting, best first."""
        return sorted(self._by_tier)
