"""The step loop: take what arrived, plan, execute, commit, hand over what is to be said. One thread, no network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from queue import Empty

from engine.backends.contract import Backend
from engine.protocol.messages import Heartbeat
from engine.scheduler import Scheduler
from engine.scheduler.contract import Accounts, Room
from engine.serve.link import (
    Abandoned,
    Accounted,
    Arrived,
    Broken,
    Cancelled,
    DrainOrdered,
    Item,
    Link,
    Prepared,
    Refused,
)
from engine.serve.log import Log
from engine.serve.meter import Meter
from engine.serve.roster import Roster
from engine.serve.sender import Sender
from engine.serve.shadow import Shadow
from engine.text import Tokenizer

__all__ = ["EXIT_FAULT", "EXIT_REFUSED", "StepLoop"]

EXIT_FAULT = 70
EXIT_REFUSED = 3
_IDLE_S = 0.25
_EMPTY_PLAN_S = 0.005
"""A plan may be empty though work waits (a batch window): look again so much later."""
_STOPPED = "the engine was stopped before the answer was complete"
_FAILED = "the engine failed while it computed this request"
_WITHDRAW_S = 2.0
"""So long a drained engine waits to hear that nothing is pulled for it any more. (Redis may be away.)"""
_NUDGE_S = 0.01
"""Shortest time between two pulls asked for by the loop."""


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class StepLoop:
    """Runs until it is told to drain and nothing is left, or the pool refuses the engine, or the backend fails."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        engine: str,
        link: Link,
        sender: Sender,
        log: Log,
        drain_s: float,
    ) -> None:
        self.backend, self.scheduler, self.link, self.sender, self.log = backend, scheduler, link, sender, log
        self.roster = Roster(backend, scheduler, tokenizer, engine, wall_ms, self._prepared)
        self.meter = Meter()
        self.draining = False
        self._drain_until: float | None = None
        self.drain_s = drain_s
        self._exit: int | None = None
        self._evictable: dict[int, tuple[int, int]] = {}
        self._nudged_at = 0.0
        self._held_back = False
        """Credit was cut because too much is under preparation: the puller waits to be told when it is not."""
        self._told: dict[str, float] = {}
        self._in_step: set[int] = set()
        """Sequences that a failure of the step would concern."""
        self._pause_s = 0.0
        self.shadow: Shadow | None = None

    def drain(self) -> None:
        """Take no more work; what still runs after `drain_s` is ended. Safe to call from a signal handler."""
        self.draining = True
        self.link.quiet.set()
        self.link.inbox.put(None)

    def run(self) -> int:
        """The process's exit status."""
        while self._exit is None:
            self._receive(self._patience())
            if self.draining and self._drained():
                return 0
            if not self.scheduler.idle and self._exit is None:
                self._try_step()
            self._offer()
        return self._exit

    # Taking ------------------------------------------------------------------------------------------------------

    def _patience(self) -> float:
        """How long to wait for something to arrive: not at all while there is work."""
        return _IDLE_S if self.scheduler.idle else self._pause_s

    def _receive(self, wait_s: float) -> None:
        now = time.monotonic()
        try:
            item = self.link.inbox.get(timeout=wait_s) if wait_s else self.link.inbox.get_nowait()
            now = time.monotonic()
            while True:
                self._handle(item, now)
                item = self.link.inbox.get_nowait()
        except Empty:
            pass
        self._hand_over()

    def _prepared(self, prepared: Prepared) -> None:
        """Called from any thread."""
        self.link.inbox.put(prepared)

    def _handle(self, item: Item, now: float) -> None:
        match item:
            case Arrived():
                self.roster.admit(item, now)
            case Accounted(accounts):
                self._told.update(accounts)
            case Prepared():
                self.roster.prepared(item, now)
            case Cancelled(request, reason):
                if self.roster.cancel(request, reason, now):
                    self.log.debug("cancelled", request=request, reason=reason)
            case Abandoned():
                count = len(self.roster.requests)
                for active in list(self.roster.requests.values()):
                    self.roster.forget(active, now)
                    self.link.known.discard(active.work.request)
                self.log.warning("requests_abandoned", count=count)
            case DrainOrdered():
                self.drain()
            case Broken(detail):
                self.log.error("thread_failed", detail=detail)
                self._exit = EXIT_FAULT
            case Refused(sentence):
                self.log.error("refused", detail=sentence)
                self._exit = EXIT_REFUSED

    def _drained(self) -> bool:
        now = time.monotonic()
        if self._drain_until is None:
            self._drain_until = now + self.drain_s
            self.link.nudge.set()
            self.log.info("draining", requests=len(self.roster.requests), seconds=self.drain_s)
        if now >= self._drain_until and self.roster.requests:
            self.log.warning("drain_cut", requests=len(self.roster.requests))
            for active in list(self.roster.requests.values()):
                self.roster.fail(active, "abort", "engine_draining", _STOPPED, now)
            self._hand_over()
        settled = self.link.withdrawn.is_set() or now >= self._drain_until - self.drain_s + _WITHDRAW_S
        return settled and not self.roster.requests and self.link.inbox.empty()

    # Stepping ----------------------------------------------------------------------------------------------------

    def _try_step(self) -> None:
        self._in_step = set(self.roster.sequences)
        try:
            self._step()
        except Exception as error:  # whatever went wrong: requests must end, and the process starts afresh
            self._fault(self._in_step, error)

    def _step(self) -> None:
        now = time.monotonic()
        plan = self.scheduler.plan(now, self._news())
        if self.shadow is not None:
            self.shadow.look(plan, now)
        self._pause_s = _EMPTY_PLAN_S if plan.empty else 0.0
        self._in_step = {s.sequence for s in plan.slices}
        outcome = self.backend.execute(plan)
        now = time.monotonic()
        prefill = self.roster.account(plan, outcome, now)
        advances = self.scheduler.commit(plan, outcome, now)
        self.roster.advance(advances, now)
        if plan.slices:
            self.meter.step(now, outcome.seconds, prefill, sum(len(a.tokens) for a in advances))
        self.roster.charge(self.scheduler.take_charges(), self.link.tiers)
        self._hand_over()

    def _news(self) -> Accounts | None:
        """What pulls have told of the accounts since the last plan, keyed by rank as the scheduler wants it."""
        if not self._told:
            return None
        told, self._told = self._told, {}
        ranks = {name: rank for rank, name in self.link.tiers.items()}
        deficits: dict[int, float] = {}
        counters: dict[tuple[int, str], float] = {}
        for name, value in told.items():
            tier, _, tenant = name.partition(":")
            if tier in ranks and tenant:
                counters[ranks[tier], tenant] = value
            elif tier in ranks:
                deficits[ranks[tier]] = value
        return Accounts(deficits, counters)

    def _fault(self, sequences: set[int], error: Exception) -> None:
        """A step crashed: who was in it gets an error; the rest is given back with the lease; the process is over."""
        detail = f"{type(error).__name__}: {error}"[:300]
        self.log.error("engine_fault", detail=detail, sequences=len(sequences))
        now = time.monotonic()
        for active in list(self.roster.requests.values()):
            if not sequences.isdisjoint(active.choices):
                self.roster.fail(active, "error", "engine_fault", _FAILED, now)
        self._hand_over()
        self._exit = EXIT_FAULT

    def _hand_over(self) -> None:
        parcel = self.roster.take_parcel()
        if not parcel.empty:
            self.sender.send(parcel)

    # Offering ----------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Publish the credit for the next pull, unless a pull is under way or its works are still in the inbox."""
        link = self.link
        idle = self.scheduler.idle
        if self.draining or not (link.lock.acquire(timeout=0.05) if idle else link.lock.acquire(blocking=False)):
            return
        try:
            if not link.inbox.empty():
                return
            rooms = self.scheduler.room(time.monotonic())
            link.tokens = max((room.tokens + room.evictable_tokens for room in rooms.values()), default=0)
            link.credit = self._credit(rooms)
            link.spare = any(room.slots > 0 and room.tokens > 0 for room in rooms.values())
            offered = bool(link.credit)
        finally:
            link.lock.release()
        now = time.monotonic()
        if offered and (not idle or self._held_back) and now - self._nudged_at >= _NUDGE_S:
            self._nudged_at = now
            self._held_back = False
            link.nudge.set()

    def _credit(self, rooms: Mapping[int, Room]) -> dict[str, int]:
        """Slots by tier name, and under "+" the rows that may be kept for light tenants: those whose requests, running
        and queued, ask for no more rows than an equal share (see `engine.protocol.fair`). Under "+tier" rows that they
        may take from the tier's largest tenant.

        What could be evicted is offered one step later, so that idle engines pull first.
        """
        credit: dict[str, int] = {}
        evictable: dict[int, tuple[int, int]] = {}
        for rank, room in rooms.items():
            name = self.link.tiers.get(rank)
            if name is None:
                continue
            evictable[rank] = (room.evictable_slots if room.evictable_tokens > 0 else 0, room.light_slots)
            worse, light = map(min, evictable[rank], self._evictable.get(rank, (0, 0)))
            slots = (room.slots if room.tokens > 0 else 0) + worse
            if slots > 0:
                credit[name] = slots
            if light > 0:
                credit[f"+{name}"] = light
            if room.express_slots > 0:
                credit["+"] = room.express_slots
        self._evictable = evictable
        return self._prepared_first(credit)

    def _prepared_first(self, credit: dict[str, int]) -> dict[str, int]:
        """No more than may be under preparation: what waits for that here, others could not overtake any more.

        A pull spends a tier's slots and those under "+" apart, so both together may be no more than that.
        """
        most = self.backend.capacity.max_preparing
        if not most:
            return credit
        left = most - self.roster.preparing
        cut = {tier: min(slots, left) for tier, slots in credit.items() if tier[0] != "+"} if left > 0 else {}
        express = min(credit.get("+", 0), left - max(cut.values(), default=0))
        if express > 0:
            cut["+"] = express
        self._held_back = self._held_back or cut != credit
        return cut

    # Reporting ---------------------------------------------------------------------------------------------------

    def heartbeat(self, common: Mapping[str, object]) -> Heartbeat:
        """The state of the engine now; `common` are the fields that never change. Called by the puller's thread."""
        prefill, output = self.meter.rates(time.monotonic())
        device, size = self.scheduler.device, self.backend.capacity.block_size
        running = list(self.scheduler.running.values())
        return Heartbeat(
            **common,  # type: ignore[arg-type]
            state="draining" if self.draining else "ready",
            at_ms=wall_ms(),
            steps=self.meter.steps,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.backlog),
            parked=len(self.scheduler.parked),
            kv_free=len(device.free),
            kv_cached=device.index.evictable,
            kv_unwritten=sum(max(0, len(s.table.blocks) * size - s.computed) for s in running),
            tokens_per_s=output,
            prefill_tokens_per_s=prefill,
            step_s=self.meter.step_s,
            by_tier=self.roster.running_by_tier(),
            made=self.roster.made.copy(),
            shadow=dict(self.shadow.counts) if self.shadow is not None else {},
        )
