"""The books of fairness: tier deficits and tenant counters, as last seen in the queue plus what was charged since.

With a queue in front (accounts given to `plan`), the queue charges prompts and decides whose turn a floor is; this book
only adds what it has not sent yet. Without one, the book is complete by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.contract import Accounts

__all__ = ["Book"]

Key = tuple[int, str]

_COMPANY_S = 60.0


class Book:
    """Counters are weighted tokens divided by the tenant's weight; deficits are weighted tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.counters: dict[Key, float] = {}
        self.deficits: dict[int, float] = dict.fromkeys(config.floors, 0.0)
        self.shared = False
        """True when a queue in front keeps the accounts."""
        self.passed: dict[int, int] = {}
        """By tier: admissions since its longest-waiting sequence was last served."""
        self._unsent: dict[Key, list[float]] = {}
        self._seen = Accounts({}, {})
        self._active: dict[int, dict[str, int]] = {}
        self._greatest: dict[int, float] = {}
        self._latest: tuple[Key | None, float] = None, -inf
        self._other_s = -inf
        """When somebody else than the latest to arrive last did."""

    def enter(self, tier: int, tenant: str, now: float) -> None:
        """A request of the tenant arrived. Back from idle, its counter is lifted to the smallest active one, and where
        nobody is active to the greatest."""
        active = self._active.setdefault(tier, {})
        if tenant not in active and not self.shared:
            level = self.least(tier) if active else self._greatest.get(tier, 0.0)
            self.counters[tier, tenant] = max(self.counters.get((tier, tenant), 0.0), level)
        active[tenant] = active.get(tenant, 0) + 1
        latest, at_s = self._latest
        if latest != (tier, tenant):
            self._other_s = at_s
        self._latest = (tier, tenant), now

    def company(self, now: float) -> bool:
        """Has more than one tenant, or one in more than one tier, asked in the last minute?"""
        return now - self._other_s < _COMPANY_S

    def leave(self, tier: int, tenant: str) -> None:
        active = self._active[tier]
        active[tenant] -= 1
        if not active[tenant]:
            del active[tenant]
        if not active and tier in self.deficits:  # nothing is saved up while nobody asks
            self.deficits[tier] = min(0.0, self.deficits[tier])

    def least(self, tier: int) -> float:
        """Smallest counter among the tier's tenants that have anything waiting, running or parked."""
        counters = self.counters
        return min((counters.get((tier, tenant), 0.0) for tenant in self._active.get(tier, ())), default=0.0)

    def due(self, tier: int, cost: float, spent: float = 0.0) -> bool:
        """Has the tier saved up enough of its floor for a request that costs this much to admit?"""
        deficit = self.deficits.get(tier)
        if deficit is None:
            return False
        return deficit - spent >= min(self._config.deficit_cap, max(self._config.floor_quantum, cost))

    def charge(self, tier: int, tenant: str, weight: float, cost: float, backlog: Iterable[int] = ()) -> None:
        """Book service: the tenant's counter rises, its tier's deficit falls, every waiting tier earns its floor."""
        key = (tier, tenant)
        self.counters[key] = self.counters.get(key, 0.0) + cost / weight
        self._greatest[tier] = max(self._greatest.get(tier, 0.0), self.counters[key])
        if self.shared:
            unsent = self._unsent.setdefault(key, [0.0, 0.0])
            unsent[0] += cost
            unsent[1] += cost / weight
        cap, deficits, floors = self._config.deficit_cap, self.deficits, self._config.floors
        for waiting in backlog:
            if waiting in floors:
                deficits[waiting] = min(cap, deficits[waiting] + floors[waiting] * cost)
        if tier in deficits:
            deficits[tier] = max(-cap, deficits[tier] - cost)

    def take_charges(self) -> tuple[tuple[int, str, float], ...]:
        """Charges not yet sent, in a stable order; the caller sends them now."""
        charges = tuple((tier, tenant, cost) for (tier, tenant), (cost, _) in sorted(self._unsent.items()) if cost)
        self._unsent.clear()
        return charges

    def adopt(self, accounts: Accounts) -> None:
        """What changed in the queue's view replaces ours, but for what it has not been told yet."""
        self.shared = True
        for key, counter in accounts.counters.items():
            if self._seen.counters.get(key) != counter:
                self.counters[key] = counter + self._unsent.get(key, (0.0, 0.0))[1]
        for tier, deficit in accounts.deficits.items():
            if tier in self.deficits and self._seen.deficits.get(tier) != deficit:
                unsent = sum(cost for (t, _), (cost, _) in self._unsent.items() if t == tier)
                self.deficits[tier] = deficit - unsent
        self._seen = accounts

    def admitted(self, tier: int, oldest: bool) -> None:
        self.passed[tier] = 0 if oldest else self.passed.get(tier, 0) + 1
