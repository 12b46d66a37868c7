"""What the serving loop may ask of a scheduler, and what it must tell it.

The loop is: submit / cancel what arrived -> plan(now) -> runner.execute(plan) -> commit(plan, outcome, now) -> emit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.scheduler.step import StepOutcome, StepPlan

__all__ = ["Accounts", "Advance", "Request", "Room", "Scheduling"]


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to compute, as the scheduler sees it. `n > 1` is several requests with one `group`.

    `sequence` is the engine-local arrival number: unique, growing, the last key of every order.
    `prompt` are token ids (prompt plus, after a re-dispatch, the tokens already delivered). `max_new` bounds output.
    `arrival_s` and `ttft_deadline_s` are on the caller's monotonic clock; the deadline is the tier's (inf: none).
    `tpot_s` is the tier's target between tokens (0: none).
    `salt` keeps one tenant's prefix cache apart from another's. `ends` are token ids that end the sequence.
    A one-shot request (embedding, image) has `max_new == 0`: its only slice ends it; `cost_tokens` prices it.
    """

    sequence: int
    group: int
    tier: int
    tenant: str
    prompt: tuple[int, ...]
    max_new: int
    arrival_s: float
    ttft_deadline_s: float
    tpot_s: float
    ends: frozenset[int] = frozenset()
    salt: str = ""
    min_new: int = 0
    weight: float = 1.0
    cost_tokens: int = 0
    by_floor: bool = False
    """Admitted by its tier's guaranteed floor (then a better tier may not evict it until the deficit is spent)."""
    light: bool = False
    """Its tenant asked for no more than its share of the pool when it was pulled."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """A snapshot of the pool's accounts in Redis: tier deficits (token cost) and (tier, tenant) virtual counters."""

    deficits: Mapping[int, float]
    counters: Mapping[tuple[int, str], float]


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine can take of one tier now: slots and tokens, with `evictable` counted apart from what is free."""

    slots: int
    tokens: int
    evictable_slots: int = 0
    evictable_tokens: int = 0
    express_slots: int = 0
    """Free rows that the queue may keep for light tenants: one number for the engine, told with every tier."""
    light_slots: int = 0
    """Rows of the tier's largest tenant that light ones could take from it."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What a commit did to one sequence: tokens it gained, and why it ended if it did.

    `finish` is None, "stop" (an end token, which is not among `tokens`), "length", or "error".
    """

    sequence: int
    tokens: tuple[int, ...]
    finish: str | None = None
    reason: str = ""


class Scheduling(Protocol):
    """The scheduler as the serving loop, the simulator, replay and shadow mode use it."""

    def submit(self, request: Request, now: float) -> None:
        """Add a sequence. Raises ValueError when it could never fit (prompt longer than the whole pool)."""

    def end(self, sequence: int, now: float) -> None:
        """End a sequence from outside (cancel, stop string, expiry). Unknown numbers are ignored."""

    def plan(self, now: float, accounts: Accounts | None = None) -> StepPlan:
        """Decide the next step. Pure but for the ledger it forks: an uncommitted plan changes nothing."""

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> tuple[Advance, ...]:
        """Take over the plan's acts and the outcome's tokens."""

    def room(self, now: float) -> Mapping[int, Room]:
        """Credit by tier: what to offer the queue in the next pull."""

    def take_charges(self) -> tuple[tuple[int, str, float], ...]:
        """Service not yet reported to the queue's accounts: (tier, tenant, weighted cost). Each is told once.

        Send them before the pull whose accounts go into the next `plan`, so that nothing is counted twice.
        """

    @property
    def idle(self) -> bool:
        """True when nothing waits, runs or is parked."""

    def check(self) -> None:
        """Raise AssertionError unless the books balance (free + live + cached + parked = all)."""
