"""Virtual time: arrivals, a queue, engines that run the real scheduler on a cost model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any
from zlib import crc32

from engine.protocol.fair import UNIT, FairQueue, is_late
from engine.scheduler import Scheduler, SchedulerConfig, create
from engine.scheduler.contract import Accounts, Advance, Request
from engine.scheduler.cost import Load, StepCost
from engine.scheduler.step import Sample, StepOutcome, StepPlan
from engine.sim.workload import TIERS, Arrival

__all__ = ["COSTS", "Engine", "Life", "World"]

COSTS = {
    "cpu": (0.0155, 6e-4, 6.5e-4, 8e-7),  # a 135M model on two cores
    "gpu": (0.006, 2e-5, 3e-5, 4e-9),  # an 8B model on a large GPU
}
"""Step costs (c, γ, b, a) in seconds; see `engine.scheduler.cost`."""
END = 1
OTHER = 0


@dataclass(slots=True)
class Life:
    """What became of one request."""

    arrival: Arrival
    first_s: float = -1.0
    last_s: float = -1.0
    stall_s: float = 0.0
    tokens: int = 0
    parks: int = 0
    done: bool = False
    refused: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)

    @property
    def met(self) -> bool:
        """Did it meet its tier's targets? A refused or unfinished one did not."""
        tier = TIERS[self.arrival.tier]
        return self.done and self.ttft_s <= tier.ttft_s and self.tpot_s <= tier.tpot_s


class Engine:
    """A scheduler, and steps that take as long as the cost model says."""

    def __init__(self, scheduler: Scheduler, cost: StepCost, lives: dict[int, Life], static: bool, link: float) -> None:
        self.scheduler, self.cost, self.lives, self.static, self.link = scheduler, cost, lives, static, link
        self.plan: StepPlan | None = None
        self.outcome = StepOutcome(0)
        self.steps = self.computed = self.recomputed = self.swaps = 0
        self.busy_s = 0.0
        self.evictable: dict[int, tuple[int, int]] = {}
        self.asleep = True

    def credit(self, now: float) -> dict[str, int]:
        """Slots by tier name; what could be evicted is offered one step later."""
        if self.static and not self.scheduler.idle:
            return {}
        offered, evictable = {}, {}
        for rank, room in self.scheduler.room(now).items():
            evictable[rank] = room.evictable_slots, room.light_slots
            worse, light = map(min, evictable[rank], self.evictable.get(rank, (0, 0)))
            if slots := (room.slots if room.tokens > 0 else 0) + worse:
                offered[TIERS[rank].name] = slots
            if light:
                offered[f"+{TIERS[rank].name}"] = light
            if room.express_slots:
                offered["+"] = room.express_slots
        self.evictable = evictable
        return offered

    def begin(self, now: float, accounts: Accounts | None) -> float:
        """Plan a step; its duration. The samples are known at once, they are told when it ends."""
        plan = self.plan = self.scheduler.plan(now, accounts)
        load = Load.of(plan.slices)
        if self.static:  # rows that have ended are computed until the whole batch has
            load = Load(load.prefill, max(load.rows, self.scheduler.config.max_rows), load.context)
        seconds = self.cost.seconds(load) if plan.slices else 0.0
        moved = sum(len(p.device) for p in plan.parks) + sum(len(r.host) for r in plan.restores)
        seconds += moved * self.scheduler.config.block_bytes / self.link
        samples = []
        for piece in plan.slices:
            if piece.samples:
                life = self.lives[piece.sequence]
                samples.append(Sample(piece.sequence, (END if life.tokens >= life.arrival.output else OTHER,)))
        for park in plan.parks:
            self.lives[park.sequence].parks += 1
            self.swaps += bool(park.host)
            self.recomputed += 0 if park.host else self.scheduler.running[park.sequence].computed
        self.outcome = StepOutcome(plan.step, tuple(samples), seconds)
        self.steps += 1
        self.computed += plan.tokens
        self.busy_s += seconds
        return max(seconds, 1e-4)

    def end(self, now: float) -> tuple[Advance, ...]:
        assert self.plan is not None  # noqa: S101 (for the type checker)
        advances = self.scheduler.commit(self.plan, self.outcome, now)
        for advance in advances:
            life = self.lives[advance.sequence]
            if advance.tokens:
                if life.first_s < 0.0:
                    life.first_s = now
                else:
                    life.stall_s = max(life.stall_s, now - life.last_s)
                life.last_s = now
                life.tokens += len(advance.tokens)
            if advance.finish is not None:
                life.done = advance.finish != "error"
        return advances


@dataclass
class World:
    """Engines behind one fair queue (or, with `front=False`, fed directly in turn)."""

    config: SchedulerConfig
    policy: str = "tiered"
    engines: int = 1
    front: bool = True
    static: bool = False
    shed: bool = False
    truth: tuple[float, float, float, float] = COSTS["cpu"]
    link: float = 0.0
    """True swap bandwidth, bytes/s; 0: what the scheduler believes."""
    make: Callable[[str, SchedulerConfig], Any] = create
    lives: dict[int, Life] = field(default_factory=dict)
    now: float = 0.0
    stopped: bool = False
    """Set by a progress callback: end the run now."""

    def __post_init__(self) -> None:
        self.queue = FairQueue()
        self._streams: dict[tuple[str, str], deque[int]] = {}
        self._events: list[tuple[float, int, int]] = []
        self._next = 0
        self.fleet = [
            Engine(
                self.make(self.policy, self.config),
                StepCost(*self.truth),
                self.lives,
                self.static,
                self.link or self.config.swap_bytes_per_s,
            )
            for _ in range(self.engines)
        ]

    def run(
        self, arrivals: Iterable[Arrival], until_s: float = 1e18, progress: Callable[[int], None] | None = None
    ) -> World:
        """Play all arrivals to their end (or to `until_s`)."""
        source = iter(arrivals)
        upcoming = next(source, None)
        done = 0
        while (upcoming is not None or self._events) and not self.stopped:
            if upcoming is not None and (not self._events or upcoming.at_s <= self._events[0][0]):
                self.now = max(self.now, upcoming.at_s)
                self._arrive(upcoming)
                upcoming = next(source, None)
                continue
            self.now, _, number = heappop(self._events)
            if self.now > until_s:
                break
            engine = self.fleet[number]
            for advance in engine.end(self.now):
                if advance.finish is not None:
                    self._ended(advance.sequence)
                    done += 1
            if progress is not None:
                progress(done)
            self._charge(engine)
            self._go(engine, number)
        return self

    def _arrive(self, arrival: Arrival) -> None:
        number = self._next = self._next + 1
        life = self.lives[number] = Life(arrival)
        if not self.front:
            target = number % self.engines
            engine = self.fleet[target]
            request = self._request(number, False, False)
            if self.shed and engine.scheduler.refuses(request, self.now):
                life.refused = True
                return
            engine.scheduler.submit(request, self.now)
            if engine.asleep:
                self._go(engine, target)
            return
        tier = TIERS[arrival.tier].name
        self.queue.enter(tier, arrival.tenant, self._heads, int(arrival.weight * UNIT))
        self._streams.setdefault((tier, arrival.tenant), deque()).append(number)
        for index, engine in enumerate(self.fleet):
            if engine.asleep:
                self._go(engine, index)
                break

    def _request(self, number: int, by_floor: bool, light: bool) -> Request:
        a = self.lives[number].arrival
        tier = TIERS[a.tier]
        opening = crc32(f"{a.tenant}/{a.prefix}".encode()) if a.shared else 0
        own = number * 10_007
        prompt = (*range(opening, opening + a.shared), *range(own, own + a.prompt - a.shared))
        return Request(
            number, number, a.tier, a.tenant, prompt, a.output + 1, a.at_s, a.at_s + tier.ttft_s, tier.tpot_s,
            ends=frozenset((END,)), salt=a.tenant, weight=a.weight, by_floor=by_floor, light=light,
        )  # fmt: skip

    def _go(self, engine: Engine, number: int) -> None:
        """Pull what there is room for, then begin the next step (or sleep)."""
        if self.front and self._streams:
            self._pull(engine)
        engine.asleep = engine.scheduler.idle
        if not engine.asleep:
            heappush(self._events, (self.now + engine.begin(self.now, self._accounts()), self._next, number))

    def _queued(self) -> list[tuple[str, int]]:
        waiting = {tier for tier, _ in self._streams}
        return [(tier.name, tier.rank) for tier in TIERS if tier.name in waiting]

    def _heads(self, tier: str, late: bool) -> list[tuple[int, str]]:
        return sorted(
            (queue[0], member)
            for (name, member), queue in self._streams.items()
            if name == tier and member.startswith("!") is late
        )

    def _pull(self, engine: Engine) -> None:
        credit = engine.credit(self.now)
        lines = self.queue.lines(self._queued(), credit)
        while credit and (picked := self.queue.pick(self._queued(), credit, self._heads, lines)) is not None:
            tier, member = picked.tier, picked.tenant
            queue = self._streams[tier, member]
            number = queue.popleft()
            if not queue:
                del self._streams[tier, member]
            arrival = self.lives[number].arrival
            tenant, waited_ms = arrival.tenant, int(1000 * (self.now - arrival.at_s))
            if not picked.light and is_late(member, waited_ms, int(1000 * TIERS[arrival.tier].ttft_s)):
                self._streams.setdefault((tier, f"!{tenant}"), deque()).append(number)
                continue
            for name in (picked.express,) if picked.express else [name for name in credit if name[0] != "+"]:
                credit[name] -= 1
            self.queue.start(picked, lines[tier])
            request = self._request(number, picked.by_floor, picked.light)
            cost = int(self.config.w_in * len(request.prompt) * UNIT)
            self.queue.charge(tier, tenant, cost, self._queued())
            engine.scheduler.submit(request, self.now)

    def _charge(self, engine: Engine) -> None:
        for rank, tenant, cost in engine.scheduler.take_charges():
            self.queue.charge(TIERS[rank].name, tenant, int(cost * UNIT), self._queued())

    def _accounts(self) -> Accounts | None:
        if not self.front:
            return None
        ranks = {tier.name: tier.rank for tier in TIERS}
        counters = {(ranks[tier], tenant): value / UNIT for (tier, tenant), value in self.queue.counters.items()}
        return Accounts({ranks[t]: d / UNIT for t, d in self.queue.deficits.items()}, counters)

    def _ended(self, number: int) -> None:
        if self.front:
            arrival = self.lives[number].arrival
            self.queue.stop(TIERS[arrival.tier].name)
            self.queue.leave(TIERS[arrival.tier].name, arrival.tenant)
