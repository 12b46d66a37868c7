"""What a policy is asked: three small questions about order, and what it may look at to answer them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.scheduler.accounts import Book
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.cost import StepCost
from engine.scheduler.sequence import Sequence

__all__ = ["Key", "Policy", "View"]

Key = tuple[float, ...]


class View:
    """The facts of one plan. `now` was read once by the caller; nothing here reads a clock."""

    __slots__ = ("book", "config", "cost", "hit", "now")

    def __init__(
        self, now: float, config: SchedulerConfig, cost: StepCost, book: Book, hit: Callable[[Sequence], int]
    ) -> None:
        self.now, self.config, self.cost, self.book, self.hit = now, config, cost, book, hit

    def slack(self, s: Sequence) -> float:
        """Seconds to spare before the sequence misses its deadline, if it were served from now on without a break."""
        if s.generated:
            return s.first_s + (s.generated + 1) * s.request.tpot_s - self.now
        return s.request.ttft_deadline_s - self.now - self.cost.prefill_seconds(s.known - max(s.computed, self.hit(s)))


class Policy(Protocol):
    """Smaller keys go first. A key never holds the arrival number: the planner appends it, so the order is total.

    `band` is the class of a sequence: within one band a sequence that already has computed tokens (prefilling, then
    parked) precedes newcomers. `urgency` orders equals.
    """

    name: str

    def band(self, s: Sequence, view: View) -> Key: ...

    def urgency(self, s: Sequence, view: View) -> Key: ...

    def evicts(self, waiting: Sequence, running: Sequence, view: View) -> bool:
        """May `waiting` take the place of `running`? A strict order, so that no two evict each other in turn."""
        ...
