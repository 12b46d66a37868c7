"""What a policy is asked: three small questions about order, and what it may look at to answer them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Protocol

from engine.scheduler.accounts import Book
from engine.scheduler.backlog import Backlog
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.cost import StepCost
from engine.scheduler.sequence import Sequence, State

__all__ = ["Key", "Policy", "Price", "View"]

Key = tuple[float, ...]
Price = Callable[[Sequence], float]


class View:
    """The facts of one plan. `now` was read once by the caller; nothing here reads a clock.

    What the plan admits is charged here on paper, so that a tenant can't take a whole step before its counter moves.
    """

    def __init__(
        self,
        now: float,
        config: SchedulerConfig,
        cost: StepCost,
        book: Book,
        backlog: Backlog,
        hit: Callable[[Sequence], int],
        running: Mapping[int, Sequence],
    ) -> None:
        self.now, self.config, self.cost, self.hit = now, config, cost, hit
        self._book, self._backlog, self._running = book, backlog, running
        self._counters: dict[tuple[int, str], float] = {}
        self._deficits: dict[int, float] = {}
        self._least: dict[int, float] = {}
        self._oldest: dict[int, int] = {}
        self._most: dict[int, int] = {}

    def slack(self, s: Sequence) -> float:
        """Seconds to spare before the sequence misses its deadline, if it were served from now on without a break."""
        if s.generated:
            return s.due_s - self.now
        todo = s.known - max(s.computed, self.hit(s))
        return s.request.ttft_deadline_s - self.now - self.cost.prefill_seconds(todo)

    def admission_cost(self, s: Sequence) -> float:
        return self.config.w_in * s.billed

    def charge(self, s: Sequence) -> None:
        """The plan admits a newcomer."""
        cost, key = self.admission_cost(s), (s.tier, s.tenant)
        self._counters[key] = self._counters.get(key, 0.0) + cost / s.request.weight
        self._move(s, 1)
        self._deficits[s.tier] = self._deficits.get(s.tier, 0.0) + cost

    def counter(self, s: Sequence) -> float:
        """The tenant's virtual token counter in this tier."""
        key = (s.tier, s.tenant)
        return self._book.counters.get(key, 0.0) + self._counters.get(key, 0.0)

    def gate(self, s: Sequence) -> float:
        """How far the tenant is beyond Δ above the smallest active counter of its tier; 0 for those within."""
        least = self._least.get(s.tier)
        if least is None:
            least = self._least[s.tier] = self._book.least(s.tier)
        return max(0.0, self.counter(s) - least - self.config.gate_tokens)

    @cached_property
    def _rows(self) -> Counter[tuple[int, str]]:
        return Counter([(s.tier, s.tenant) for s in self._running.values()])

    def _move(self, s: Sequence, by: int) -> None:
        self._rows[s.tier, s.tenant] += by
        self._most.pop(s.tier, None)

    def park(self, s: Sequence) -> None:
        """The plan takes a running one's row."""
        self._move(s, -1)

    def most(self, tier: int) -> int:
        """Rows of the tier's tenant that has most."""
        if tier not in self._most:
            self._most[tier] = max([n for (of, _), n in self._rows.items() if of == tier], default=0)
        return self._most[tier]

    def light(self, s: Sequence) -> bool:
        """Does its tenant ask for no more than its share (the queue tells), and even with a row more have fewer than
        another of its tier?"""
        return s.request.light and self._rows[s.tier, s.tenant] + 1 < self.most(s.tier)

    def displaces(self, s: Sequence, running: Sequence) -> bool:
        """Has a light tenant the better right to the row, because the other's has most of the tier's?"""
        most = s.tier == running.tier and self._rows[running.tier, running.tenant] == self.most(s.tier)
        return most and self.light(s)

    def by_floor(self, s: Sequence) -> bool:
        """Is this the floor's turn: pulled by it, or (with no queue in front) due now; and not spent yet?"""
        if s.state is State.WAITING:
            if s.by_floor or self._book.shared or s.tier not in self._book.deficits:
                return s.by_floor
            return self._book.due(s.tier, self.admission_cost(s), self._deficits.get(s.tier, 0.0))
        return s.by_floor and self._book.deficits.get(s.tier, 0.0) > 0.0

    def settling(self, s: Sequence) -> bool:
        """Just started or restored: its minimum stay is not over."""
        return self.now - s.since_s < self.config.min_stay_s

    def its_turn(self, s: Sequence) -> bool:
        """Aging: after `aging_every` admissions of a tier its longest-waiting one goes."""
        if s.state is not State.WAITING or self._book.passed.get(s.tier, 0) < self.config.aging_every:
            return False
        if s.tier not in self._oldest:
            self._oldest[s.tier] = self._backlog.oldest(s.tier)
        return self._oldest[s.tier] == s.number


class Policy(Protocol):
    """Smaller keys go first. A key never holds the arrival number: the planner appends it, so the order is total.

    `band` is the class of a sequence: within one band a sequence that already has computed tokens (prefilling, then
    parked) precedes newcomers. `urgency` orders equals, and `ties` those of equal urgency. Ties are asked late and of
    few, so they may cost more, but must not hang on what the plan charges on paper.
    """

    name: str
    relegates: bool
    """Do those that can't make their deadline any more stand behind those that can?"""
    lends: bool
    """May prefill of light tenants take the time that streams are ahead of their due?"""

    def band(self, s: Sequence, view: View) -> Key: ...

    def urgency(self, s: Sequence, view: View) -> Key: ...

    def ties(self, s: Sequence, view: View) -> Key: ...

    def reaches(self, tier: int, worst: int) -> bool:
        """Could a sequence of `tier` evict anyone at all, `worst` being the worst tier that runs?"""

    def evicts(self, waiting: Sequence, running: Sequence, view: View, price: Price) -> bool:
        """May `waiting` take the place of `running`, which costs `price(running)` seconds to bring back?

        Must be such that no two can evict each other in turn.
        """
