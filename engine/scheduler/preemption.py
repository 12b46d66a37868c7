"""Who has to go, and how: victims ordered by price, and the price of bringing one back."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.kv.table import blocks_for
from engine.scheduler.policies.base import Policy, View
from engine.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Scheduler

__all__ = ["Price", "Victims", "cheapest"]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of engine time that parking and resuming a sequence costs."""

    swap: bool
    seconds: float


def cheapest(scheduler: Scheduler, s: Sequence, host_available: int) -> Price:
    """Swap (out and in, over the measured link) or recompute (prefill of what no one else keeps): the cheaper."""
    config, refs = scheduler.config, scheduler.device.refs
    shared = 0
    for block in s.table.blocks:
        if refs[block] < 2:
            break
        shared += 1
    recompute = scheduler.cost.prefill_seconds(max(0, s.computed - shared * config.block_size))
    blocks = blocks_for(s.computed, config.block_size)
    swap = 2.0 * blocks * config.block_bytes / config.swap_bytes_per_s
    if blocks and blocks <= host_available and swap < recompute:
        return Price(True, swap)
    return Price(False, recompute)


class Victims:
    """Running sequences in the order in which they have to go; one for a plan, within which that never changes."""

    def __init__(self, scheduler: Scheduler, view: View) -> None:
        self._scheduler, self._view = scheduler, view
        self._ordered: list[Sequence] | None = None

    def _freed(self, s: Sequence) -> int:
        refs = self._scheduler.device.refs
        return sum(1 for block in s.table.blocks if refs[block] == 1)

    def _price(self, s: Sequence) -> float:
        return cheapest(self._scheduler, s, len(self._scheduler.host.free)).seconds

    def _order(self, s: Sequence) -> tuple[float, ...]:
        """Worst tier; seldom parked; most blocks freed per price; latest arrival."""
        return (-s.tier, min(s.parks, 3), -self._freed(s) / (self._price(s) + 1e-6), -s.number)

    def under_pressure(self, keep: Sequence) -> Iterator[Sequence]:
        """Memory ran out: everyone but `keep` may have to go; floor-admitted and just-started ones last."""
        running = [s for s in self._scheduler.running.values() if s is not keep]
        yield from sorted(running, key=lambda s: (self._view.by_floor(s), -s.tier, self._settling(s), self._order(s)))

    def for_newcomer(
        self, newcomer: Sequence, policy: Policy, parks: Container[int], rows: int, blocks: int
    ) -> list[Sequence]:
        """Fewest victims that give `rows` rows and `blocks` blocks; none when even all of them would not do."""

        def may_go(s: Sequence) -> bool:
            if s.number in parks or self._settling(s) or self._view.by_floor(s):
                return False
            return policy.evicts(newcomer, s, self._view, self._price)

        running = self._scheduler.running.values()
        if not any(map(may_go, running)):
            return []  # before anyone is priced: the usual case
        if self._ordered is None:
            self._ordered = sorted(running, key=self._order)
        chosen: list[Sequence] = []
        for s in self._ordered:
            if rows <= 0 and blocks <= 0:
                break
            if may_go(s):
                chosen.append(s)
                rows, blocks = rows - 1, blocks - self._freed(s)
        return chosen if rows <= 0 and blocks <= 0 else []

    def _settling(self, s: Sequence) -> bool:
        """Just started or restored: its minimum stay is not over."""
        return self._view.now - s.since_s < self._view.config.min_stay_s
