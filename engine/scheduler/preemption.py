"""Who has to go, and how: victims ordered by price, and the price of bringing one back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from heapq import heapify, heappop
from operator import attrgetter
from typing import TYPE_CHECKING

from engine.kv.table import blocks_for
from engine.scheduler.policies.base import Policy, View
from engine.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from engine.scheduler.scheduler import Scheduler

__all__ = ["TIER", "Victims", "cheapest"]

TIER = attrgetter("tier")

Order = tuple[int, int, float, int, Sequence]
"""Worst tier; seldom parked; most blocks freed per price; latest arrival (so two never compare the last)."""


def cheapest(scheduler: Scheduler, s: Sequence, shared: int, host_available: int) -> tuple[bool, float]:
    """Swap (out and in, over the measured link) or recompute (prefill of what no one else keeps): the cheaper.

    Is it swap, and the seconds of engine time that parking and resuming costs; `shared` blocks are held by others too.
    """
    config, computed = scheduler.config, s.computed
    todo = computed - shared * config.block_size if shared else computed
    recompute = scheduler.cost.prefill_seconds(todo if todo > 0 else 0)
    if host_available:
        blocks = blocks_for(computed, config.block_size)
        swap = 2.0 * blocks * config.block_bytes / config.swap_bytes_per_s
        if 0 < blocks <= host_available and swap < recompute:
            return True, swap
    return False, recompute


class Victims:
    """Running sequences in the order in which they have to go; one for a plan, within which that never changes."""

    def __init__(self, scheduler: Scheduler, view: View) -> None:
        self._scheduler, self._view = scheduler, view
        self._refs, self._host = scheduler.device.refs, len(scheduler.host.free)
        self._queue: list[Order] | None = None
        """A heap of them; nobody is priced before someone may go."""
        self._ordered: list[Sequence] = []
        """The first of them, taken from the heap."""

    def _price(self, s: Sequence) -> float:
        return cheapest(self._scheduler, s, s.table.shared(self._refs), self._host)[1]

    def _orders(self, sequences: Iterable[Sequence]) -> list[Order]:
        scheduler, refs, host = self._scheduler, self._refs, self._host
        orders = []
        for s in sequences:
            shared, parks = s.table.shared(refs), s.parks
            seconds = cheapest(scheduler, s, shared, host)[1] + 1e-6
            orders.append((-s.tier, parks if parks < 3 else 3, (shared - len(s.table.blocks)) / seconds, -s.number, s))
        return orders

    def under_pressure(self, keep: Sequence) -> Iterator[Sequence]:
        """Memory ran out: everyone but `keep` may have to go; floor-admitted and just-started ones last."""
        view, orders = self._view, self._orders(s for s in self._scheduler.running.values() if s is not keep)
        for order in sorted(orders, key=lambda o: (view.by_floor(o[-1]), o[0], view.settling(o[-1]), o)):
            yield order[-1]

    def for_newcomer(
        self, newcomer: Sequence, policy: Policy, parks: Container[int], rows: int, blocks: int
    ) -> list[Sequence]:
        """Fewest victims that give `rows` rows and `blocks` blocks; none when even all of them would not do."""
        view, price = self._view, self._price

        def may_go(s: Sequence) -> bool:
            return s.number not in parks and policy.evicts(newcomer, s, view, price)

        if not (policy.reaches(newcomer.tier, self.worst) and any(map(may_go, self.movable))):
            return []  # before anyone is priced
        chosen: list[Sequence] = []
        for s in self._in_order():
            if rows <= 0 and blocks <= 0:
                break
            if may_go(s):
                chosen.append(s)
                rows, blocks = (
                    rows - 1,
                    blocks - len(s.table.blocks) - s.lacks(view.config.block_size) + s.table.shared(self._refs),
                )
        return chosen if rows <= 0 and blocks <= 0 else []

    @cached_property
    def movable(self) -> list[Sequence]:
        """Those that newcomers may evict, if the policy lets them: settled ones that no floor keeps."""
        view, running = self._view, self._scheduler.running.values()
        latest, stay = view.now, view.config.min_stay_s
        return [s for s in running if latest - s.since_s >= stay and not (s.by_floor and view.by_floor(s))]

    @cached_property
    def worst(self) -> int:
        """Their worst tier."""
        return max(map(TIER, self.movable), default=-1)

    def _in_order(self) -> Iterator[Sequence]:
        """Few have to go, so no more are sorted than are asked for."""
        if self._queue is None:
            self._queue = self._orders(self.movable)
            heapify(self._queue)
        yield from self._ordered
        while self._queue:
            s = heappop(self._queue)[-1]
            self._ordered.append(s)
            yield s
