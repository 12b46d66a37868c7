"""The books of fairness: tier deficits and tenant counters, as last seen in the queue plus what was charged since.

With a queue in front (accounts given to `plan`), the queue charges prompts and this book only adds what it has not sent
yet. Without one, the book is complete by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.contract import Accounts

__all__ = ["Book"]


class Book:
    """Counters are weighted tokens divided by the tenant's weight; deficits are weighted tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.counters: dict[tuple[int, str], float] = {}
        self.deficits: dict[int, float] = dict.fromkeys(config.floors, 0.0)
        self._unsent: dict[tuple[int, str], float] = {}
        self._active: dict[tuple[int, str], int] = {}
        self.shared = False

    def enter(self, tier: int, tenant: str) -> None:
        """A request of the tenant arrived. Back from idle, its counter is lifted to the smallest active one."""
        key = (tier, tenant)
        if not self._active.get(key) and not self.shared:
            others = [self.counters.get(k, 0.0) for k, n in self._active.items() if n and k[0] == tier]
            if others:
                self.counters[key] = max(self.counters.get(key, 0.0), min(others))
        self._active[key] = self._active.get(key, 0) + 1

    def leave(self, tier: int, tenant: str) -> None:
        key = (tier, tenant)
        self._active[key] -= 1
        if not self._active[key]:
            del self._active[key]

    def charge(self, tier: int, tenant: str, weight: float, cost: float, backlog: Iterable[int] = ()) -> None:
        """Book service: the tenant's counter rises, its tier's deficit falls, every waiting tier earns its floor."""
        key = (tier, tenant)
        self.counters[key] = self.counters.get(key, 0.0) + cost / weight
        cap = self._config.deficit_cap
        for waiting in backlog:
            if waiting in self._config.floors:
                earned = self.deficits.get(waiting, 0.0) + self._config.floors[waiting] * cost
                self.deficits[waiting] = min(cap, earned)
        if tier in self.deficits:
            self.deficits[tier] = max(-cap, self.deficits[tier] - cost)

    def owe(self, tier: int, tenant: str, cost: float) -> None:
        """Remember a charge that the queue has to hear of."""
        self._unsent[tier, tenant] = self._unsent.get((tier, tenant), 0.0) + cost

    def take_charges(self) -> tuple[tuple[int, str, float], ...]:
        """Charges not yet sent, in a stable order; the caller sends them now."""
        charges = tuple((tier, tenant, cost) for (tier, tenant), cost in sorted(self._unsent.items()) if cost)
        self._unsent.clear()
        return charges

    def adopt(self, accounts: Accounts) -> None:
        """The queue's view replaces ours."""
        self.shared = True
        self.counters.update(accounts.counters)
        self.deficits.update(accounts.deficits)

    def floor(self, tier: int, active: Iterable[str]) -> float:
        """Smallest counter among these tenants of a tier (0 when there are none)."""
        return min((self.counters.get((tier, tenant), 0.0) for tenant in active), default=0.0)

    def tenants(self, tier: int) -> list[str]:
        """Tenants with anything waiting, running or parked in a tier."""
        return [tenant for (t, tenant) in self._active if t == tier]
