"""Which request a pool serves next, in pure Python: the twin of `fair.lua`, and what the simulator queues with.

Integers only (thousandths of a weighted token), so that Lua's doubles and Python's ints never differ.
F1 A tenant's counter only moves by what it was charged (or refunded), divided by its weight, and by the lift.
F2 A tenant that has nothing queued begins at the smallest counter of those in its tier that have; when nobody has, at
   the greatest there is: idling saves up nothing, and what was used while nobody else asked is held against nobody.
   While it has something running it may stay behind that by LEAD.
F3 A light tenant (all it asks for, running and queued, is within its max-min share of the rows) never waits for a row
   that a heavier one could take, is never late, and is ahead of the least served heavy one by LEAD at most.
F4 A tier's deficit stays within ±DEFICIT_CAP; it earns its floor's share of every charge while it has work queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["GATE", "LEAD", "QUANTUM", "UNIT", "FairQueue", "Line", "Pick", "is_late", "thousandths"]

UNIT = 1000
GATE = 64 * UNIT
"""Δ: a tenant this far above the smallest active counter of its tier may still go."""
LEAD = 8192 * UNIT
"""A light tenant this far above the least served heavy one has to queue as all do. Who asks for more while something
of its own is running may be as far below those that wait."""
TENANTS = 1024
"""Least served tenants of a tier among whom its rows are shared out."""
MISSED = 10
"""Rows are kept for light tenants until no more than so many thousandths of their requests find none."""
LIGHT_EVERY = 16
"""Requests over which the part of light ones is averaged."""
KEPT = 64
"""Most rows kept in one engine."""
QUANTUM = 1024 * UNIT
"""A floor is due once this much is saved up."""
DEFICIT_CAP = 8192 * UNIT
FLOORS = (0, 100, 50)
"""Guaranteed share of the token cost in thousandths, by tier rank; the last holds for all ranks beyond."""
HEADS = 256
"""Heads of one tier that a choice looks at."""
LATE_EVERY = 16
"""After so many others of its tier a late request goes first."""
_STANDING = ""
"""The name under which a tier's greatest counter is kept among those of its tenants."""


def is_late(member: str, waited_ms: int, ttft_ms: int) -> bool:
    """Has a head used three quarters of its TTFT target? Then it is moved to the queue of its tenant's late ones."""
    return not member.startswith(("!", "~")) and ttft_ms > 0 and 4 * waited_ms >= 3 * ttft_ms


def floor_of(rank: int) -> int:
    return FLOORS[min(rank, len(FLOORS) - 1)]


def thousandths(weight: float) -> int:
    """A tenant's weight as the queue keeps it."""
    return max(1, math.floor(weight * UNIT + 0.5))


Tiers = Sequence[tuple[str, int]]
"""(name, rank) of the tiers with anything queued, in rank order."""
Heads = Callable[[str, bool], Sequence[tuple[int, str]]]
"""(tier, late) to the (arrival, member) of its queues that have anything, by arrival."""
Line = tuple[int, int | None]
"""Share of a tier's rows, and the counter up to which a tenant within it is light (None: there is no heavy one)."""


@dataclass(frozen=True, slots=True)
class Pick:
    """`tenant` is the stream's name: "~request" for one that was lost and queued again, "!tenant" for late ones."""

    tier: str
    tenant: str
    by_floor: bool
    express: str
    """Name of the credit for light tenants that it used: "+" or "+tier"; empty: that of the tiers."""
    light: bool
    """Its tenant asks for no more than its share: it is not late."""


class FairQueue:
    """Accounts of one pool, and the choice they lead to."""

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str], int] = {}
        self.deficits: dict[str, int] = {}
        self.active: dict[str, dict[str, int]] = {}
        """By tier: rows that the requests of each tenant that has any ask for, queued or running."""
        self.rows: dict[str, int] = {}
        """By tier: rows in use."""
        self.passed: dict[str, int] = {}
        """By tier: requests pulled since a late one was. Under "+": thousandths that were light of those pulled of late
        from tiers with a heavy tenant: where there is none all are, and that says nothing of what a flood leaves."""
        self.weights: dict[str, int] = {}
        """Tenant weights, thousandths."""

    def enter(self, tier: str, tenant: str, heads: Heads, weight: int = UNIT, rows: int = 1) -> None:
        """A request for so many rows was admitted, and is not queued yet."""
        self.weights[tenant] = weight
        members = [[member.removeprefix("!") for _, member in heads(tier, late)] for late in (False, True)]
        active = self.active.setdefault(tier, {})
        if tenant not in members[0] and tenant not in members[1]:
            names = [name for some in members for name in some[:HEADS] if not name.startswith("~")] or [_STANDING]
            level = min(self.counters.get((tier, name), 0) for name in names)
            level -= LEAD if tenant in active else 0
            self.counters[tier, tenant] = max(level, self.counters.get((tier, tenant), 0))
        active[tenant] = active.get(tenant, 0) + rows

    def start(self, pick: Pick, line: Line, rows: int = 1) -> None:
        """The request that `pick` chose was pulled; `line` is its tier's."""
        tier = pick.tier
        if line[1] is not None:
            part = self.passed.get("+", 0)
            self.passed["+"] = part + ((1000 if pick.light else 0) - part) // LIGHT_EVERY
        if pick.tenant.startswith("!"):
            self.passed.pop(tier, None)
        else:
            self.passed[tier] = self.passed.get(tier, 0) + 1
        self.rows[tier] = self.rows.get(tier, 0) + rows

    def stop(self, tier: str, rows: int = 1) -> None:
        """It runs no more: it has ended, or was lost and may be queued again."""
        self.rows[tier] -= rows
        if not self.rows[tier]:
            del self.rows[tier]

    def leave(self, tier: str, tenant: str, rows: int = 1) -> None:
        """A request has ended, however it did."""
        active = self.active.get(tier, {})
        if tenant not in active:
            return
        active[tenant] -= rows
        if not active[tenant]:
            del active[tenant]
        if not active:
            del self.active[tier]
            if self.deficits.get(tier, 0) > 0:
                self.deficits[tier] = 0

    def least(self, tier: str) -> int:
        return min((self.counters.get((tier, tenant), 0) for tenant in self.active.get(tier, ())), default=0)

    def lines(self, tiers: Tiers, credit: Mapping[str, int]) -> dict[str, Line]:
        """By tier, for one pull: the max-min fair share of its rows, running and offered, and where light ones end."""
        found = {}
        for tier, _ in tiers:
            active = self.active.get(tier, {})
            served = sorted((self.counters.get((tier, tenant), 0), tenant) for tenant in active)[:TENANTS]
            left = credit.get(tier, 0) + credit.get("+", 0) + self.rows.get(tier, 0)
            share = 1
            for others, demand in enumerate(sorted(active[tenant] for _, tenant in served)):
                share = max(1, left // (len(served) - others))
                if demand > share:
                    break
                left -= demand
            heavy = next((counter for counter, tenant in served if active[tenant] > share), None)
            found[tier] = share, None if heavy is None else heavy + LEAD
        return found

    def _is_light(self, tier: str, member: str, line: Line) -> bool:
        tenant, (share, limit) = member.removeprefix("!"), line
        if member.startswith("~"):
            return True
        counter, demand = self.counters.get((tier, tenant), 0), self.active.get(tier, {}).get(tenant, 0)
        return demand <= share and (limit is None or counter <= limit)

    def _kept(self) -> int:
        """Rows of an engine that only light tenants may take. Each is found taken as often as one pull is theirs."""
        chance, part = 1000, self.passed.get("+", 0)
        for keep in range(KEPT):
            if chance <= MISSED:
                return keep
            chance = chance * part // 1000
        return KEPT

    def pick(self, tiers: Tiers, credit: Mapping[str, int], heads: Heads, lines: Mapping[str, Line]) -> Pick | None:
        """The next request; None when credit or queue is used up. `lines` are those of this pull.

        A floor that is due goes first; then the best tier with credit. In a tier: the oldest head (the least slack, as
        a tier has one deadline) among the tenants within Δ of the least served; the least served when none is. Credit
        under the name "+" is anyone's, but for the rows kept: those take the oldest head of a light tenant, as does
        credit under "+tier" (rows that heavy ones have to give up, where there are any).
        """
        spare = credit.get("+", 0)
        free = spare > self._kept()
        for by_floor in (True, False):
            for tier, rank in tiers:
                due = floor_of(rank) > 0 and self.deficits.get(tier, 0) >= QUANTUM
                slots = credit.get(tier, 0) > 0
                if (slots or free) and (due or not by_floor):
                    member = self._choose(tier, heads)
                    light = self._is_light(tier, member, lines[tier])
                    return Pick(tier, member, by_floor, "" if slots else "+", light)
        for tier, _ in tiers:
            express = "+" if spare > 0 else f"+{tier}"
            if credit.get(express, 0) <= 0 or (express != "+" and lines[tier][1] is None):
                continue
            for member in (member for late in (False, True) for _, member in heads(tier, late)[:HEADS]):
                if self._is_light(tier, member, lines[tier]):
                    return Pick(tier, member, False, express, True)
        return None

    def _choose(self, tier: str, heads: Heads) -> str:
        """Within the gate before beyond it, in each those in time before the late ones (but for a late one's turn)."""
        first = self.passed.get(tier, 0) >= LATE_EVERY
        one, within = self._choose_of(tier, heads(tier, first))
        if one is not None and within:
            return one
        other, also = self._choose_of(tier, heads(tier, not first))
        if other is not None and (also or one is None):
            return other
        if one is None:
            raise ValueError(f"tier {tier} has nothing queued")
        return one

    def _choose_of(self, tier: str, heads: Sequence[tuple[int, str]]) -> tuple[str | None, bool]:
        limit = self.least(tier) + GATE
        best, least = None, 0
        for _, tenant in heads[:HEADS]:
            counter = self.counters.get((tier, tenant.removeprefix("!")), 0)
            if tenant.startswith("~") or counter <= limit:
                return tenant, True
            if best is None or counter < least:
                best, least = tenant, counter
        return best, False

    def charge(self, tier: str, tenant: str, cost: int, queued: Tiers) -> None:
        """Book `cost` (thousandths of weighted tokens, negative to refund); `queued` tiers earn floors."""
        key = (tier, tenant)
        counter = self.counters[key] = self.counters.get(key, 0) + cost * UNIT // self.weights.get(tenant, UNIT)
        self.counters[tier, _STANDING] = max(counter, self.counters.get((tier, _STANDING), 0))
        for name, rank in queued:
            if floor_of(rank):
                earned = self.deficits.get(name, 0) + cost * floor_of(rank) // 1000
                self.deficits[name] = max(-DEFICIT_CAP, min(DEFICIT_CAP, earned))
        self.deficits[tier] = max(-DEFICIT_CAP, self.deficits.get(tier, 0) - cost)
