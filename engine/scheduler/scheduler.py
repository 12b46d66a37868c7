"""The scheduler: submit and end, plan on paper, commit once. Only `commit` changes what the plan decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from engine.kv.pool import BlockPool, HostPool
from engine.kv.table import Table, blocks_for
from engine.scheduler.accounts import Book
from engine.scheduler.backlog import Backlog
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.contract import Accounts, Advance, Request, Room
from engine.scheduler.cost import Load, StepCost
from engine.scheduler.forecast import OutputForecast
from engine.scheduler.planner import Planner
from engine.scheduler.policies.base import Policy
from engine.scheduler.sequence import Sequence, State
from engine.scheduler.step import Slice, Start, StepOutcome, StepPlan
from engine.scheduler.window import ArrivalRate

__all__ = ["Scheduler"]


class Scheduler:
    """Implements `contract.Scheduling`. One plan is in flight at a time: plan, execute, commit."""

    def __init__(self, config: SchedulerConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.device = BlockPool(config.device_blocks, config.block_size)
        self.host = HostPool(config.host_blocks)
        self.cost = StepCost()
        self.forecast = OutputForecast(config.default_output)
        self.book = Book(config)
        self.rate = ArrivalRate()
        self.backlog = Backlog()
        self.running: dict[int, Sequence] = {}
        self.parked: dict[int, Sequence] = {}
        self.dropping: list[int] = []
        """Ended sequences that the runner has not been told to forget."""
        self.step = 0
        self._all: dict[int, Sequence] = {}
        self._groups: dict[int, list[Sequence]] = {}
        self._ended: dict[int, Sequence] = {}
        self._in_flight = False

    # What the serving loop calls ---------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Add a sequence. Raises ValueError when it could never be computed."""
        config = self.config
        prompt = len(request.prompt)
        if request.sequence in self._all:
            raise ValueError(f"sequence {request.sequence} is known already")
        if not prompt and not (request.max_new == 0 and request.cost_tokens > 0):
            raise ValueError("an empty prompt can't be computed")
        most = min(config.context_length, config.device_blocks * config.block_size)
        if prompt > config.context_length or (request.max_new and prompt >= most):
            raise ValueError(f"prompt of {prompt} tokens does not fit: context and memory allow {most - 1}")
        s = Sequence(request, min(request.max_new, most - prompt), now)
        self._all[s.number] = s
        self._groups.setdefault(request.group, []).append(s)
        self.backlog.add(s)
        self.book.enter(s.tier, s.tenant, now)
        if s.one_shot:
            self.rate.observe(now)

    def refuses(self, request: Request, now: float) -> bool:
        """Early refusal: is the request's tier sheddable, and its deadline lost already to what waits before it?"""
        return request.tier in self.config.sheddable and self.wait_s(request.tier) > request.ttft_deadline_s - now

    def wait_s(self, tier: int) -> float:
        """Predicted wait of a newcomer: what waits in its tier and better ones, at the speed of the step model."""
        config = self.config
        ahead = [s for s in (*self.backlog, *self.parked.values()) if s.tier <= tier]
        if len(self.running) + len(ahead) < config.max_rows:
            return 0.0
        decodes = sum(self.remaining(s) for s in ahead) / config.max_rows
        context = config.max_rows * (sum(s.known for s in ahead) // max(1, len(ahead)))
        step_s = self.cost.seconds(Load(0, config.max_rows, context))
        return decodes * step_s + sum(self.cost.prefill_seconds(s.known) for s in ahead)

    def end(self, sequence: int, now: float) -> None:
        """End a sequence from outside. While a plan is in flight its blocks stay until that plan is committed."""
        s = self._all.get(sequence)
        if s is None or sequence in self._ended:
            return
        self._ended[sequence] = s
        if not self._in_flight:
            self._bury()

    def plan(self, now: float, accounts: Accounts | None = None) -> StepPlan:
        """Decide the next step. An uncommitted plan changes nothing; the clock is read here, once, by the caller."""
        if accounts is not None:
            self.book.adopt(accounts)
        plan = Planner(self, self.policy, now, accounts).build()
        self._in_flight = True
        return plan

    def propose(self, policy: Policy, now: float) -> StepPlan:
        """What another policy would do now (shadow mode). Changes nothing at all."""
        return Planner(self, policy, now, None).build()

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> tuple[Advance, ...]:
        """Take over the plan's acts and the outcome's tokens."""
        if plan.step != self.step or outcome.step != plan.step:
            raise ValueError(f"step {plan.step} with outcome {outcome.step} committed at step {self.step}")
        self._in_flight = False
        self.step += 1
        self._observe(plan, outcome)
        forgotten = {drop.sequence for drop in plan.drops}
        self.dropping = [n for n in self.dropping if n not in forgotten]
        self._leave(plan, now)
        self._enter(plan, now)
        advances = self._advance(plan, outcome, now)
        self._bury()
        if self.policy.relegates:
            self.backlog.relegate(lambda s: now + self.cost.prefill_seconds(s.known) > s.request.ttft_deadline_s)
        return advances

    def room(self, now: float) -> Mapping[int, Room]:
        """Credit by tier: free room after what waits here already, and what the tier could evict from worse ones."""
        config, held = self.config, [*self.backlog, *self.parked.values()]
        blocks = self.device.available - sum(s.lacks(config.block_size) for s in self.running.values())
        tokens = max(0, blocks * config.block_size - sum(s.known for s in held))
        free = config.max_rows - len(self.running) - len(held)
        kept = config.max_rows // 8 * 2 if config.express_rows < 0 else config.express_rows
        rooms: dict[int, Room] = {}
        for tier in sorted({0, 1, 2, *config.floors, *(s.tier for s in self._all.values())}):
            worse = [s for s in self.running.values() if s.tier > tier] if config.preempt else []
            # One-shot work holds nothing while it waits: it gives way to a better tier without being evicted.
            worse += [s for s in self.backlog if s.tier > tier and s.one_shot]
            evictable = max(0, len(worse) + min(0, free))
            slots = max(0, free - kept)
            evictable_tokens = sum(s.known for s in worse) if evictable else 0
            express, light = (max(0, min(kept, free)), self._light_slots(tier)) if tokens else (0, 0)
            rooms[tier] = Room(slots, tokens, evictable, evictable_tokens, express, light)
        return rooms

    def _light_slots(self, tier: int) -> int:
        """Half of the rows of the tier's largest tenant, less those that wait for one."""
        rows = Counter(s.tenant for s in self.running.values() if s.tier == tier and self.config.preempt)
        return max(0, max(rows.values(), default=0) // 2 - sum(s.tier == tier for s in self.backlog))

    @property
    def idle(self) -> bool:
        return not (self.backlog or self.running or self.parked or self.dropping or self._ended)

    def take_charges(self) -> tuple[tuple[int, str, float], ...]:
        """Service not yet reported to the queue in front: (tier, tenant, weighted cost). The caller sends it now."""
        return self.book.take_charges()

    def check(self) -> None:
        """The books balance: every block is free, live or cached, every sequence is in exactly one place."""
        self.device.check(s.table.blocks for s in self.running.values())
        self.host.check(s.host for s in self.parked.values())
        placed = [s.number for s in self.backlog] + list(self.running) + list(self.parked)
        if sorted(placed) != sorted(self._all):
            raise AssertionError("a sequence is nowhere or in two places")
        for s in self.running.values():
            if len(s.table.blocks) != blocks_for(s.computed, self.config.block_size) and not s.one_shot:
                raise AssertionError(f"{s} has other blocks than its computed tokens fill")
            if any(self.device.refs[block] > 1 for block in s.table.blocks[s.table.shared(self.device.refs) :]):
                raise AssertionError(f"{s} shares a block behind one of its own")

    # What the planner asks ---------------------------------------------------------------------------------------

    def leader(self, s: Sequence) -> Sequence | None:
        """A running sequence of the same group and prompt, whose prompt blocks `s` can share."""
        if s.generated or s.one_shot or s.host:
            return None
        for other in self._groups[s.request.group]:
            if other is not s and other.state is State.RUNNING and other.request.prompt == s.request.prompt:
                return other
        return None

    def remaining(self, s: Sequence) -> int:
        """Output tokens still expected of a sequence."""
        return self.forecast.remaining(s.tier, s.generated, s.limit)

    # Commit ------------------------------------------------------------------------------------------------------

    def _leave(self, plan: StepPlan, now: float) -> None:
        """Parks. Only now, with the step done, do blocks that a swap has read go back to the pool."""
        for park in plan.parks:
            s = self.running.pop(park.sequence)
            s.table.retire(self.device, s.tokens, s.computed)
            self.host.claim(park.host)
            if not park.host:
                s.recomputed += s.computed
            s.host, s.computed = park.host, park.computed
            s.state, s.parks, s.since_s = State.PARKED, s.parks + 1, now
            self.parked[s.number] = s

    def _enter(self, plan: StepPlan, now: float) -> None:
        """Starts, restores and extends. Shared blocks are pinned before any block is claimed for new content."""
        claims: list[int] = []
        copied = {copy.sequence: copy for copy in plan.copies}
        for start in plan.starts:
            s = self._all[start.sequence]
            copy = copied.get(s.number)
            shared = start.cached // self.config.block_size
            self.device.share(start.blocks[:shared])
            blocks = list(start.blocks)
            if copy is not None:
                blocks[copy.index] = copy.target
            claims.extend(blocks[shared:])
            self._seat(s, start, blocks, shared, now)
        for restore in plan.restores:
            s = self.parked.pop(restore.sequence)
            self.host.release(s.host)
            s.host, s.computed = (), restore.computed
            s.table = Table(s.request.salt, s.tier, restore.device)
            self._run(s, now)
            claims.extend(restore.device)
        for extend in plan.extends:
            self.running[extend.sequence].table.blocks.extend(extend.blocks)
            claims.extend(extend.blocks)
        self.device.claim(claims)

    def _seat(self, s: Sequence, start: Start, blocks: list[int], shared: int, now: float) -> None:
        path = self.device.index.match(s.request.salt, s.tokens, shared * self.config.block_size)
        ours = [node.block for node in path] == blocks[:shared]
        s.table = Table(s.request.salt, s.tier, blocks, path if ours else ())
        s.table.diverged = not ours
        if path:
            self.device.index.improve(path[-1], s.tier)
        s.computed = start.cached
        if s.state is State.WAITING:
            self.book.admitted(s.tier, self.backlog.oldest(s.tier) == s.number)
            self.backlog.remove(s)
            s.cached = start.cached
            self._charge_prompt(s)
        else:
            del self.parked[s.number]
            s.recomputed -= start.cached
        self._run(s, now)

    def _run(self, s: Sequence, now: float) -> None:
        s.state, s.since_s = State.RUNNING, now
        self.running[s.number] = s

    def _advance(self, plan: StepPlan, outcome: StepOutcome, now: float) -> tuple[Advance, ...]:
        """Computed catches up with known; sampled tokens move known ahead by one again."""
        gained = {sample.sequence: sample.tokens for sample in outcome.samples}
        faults = dict(outcome.faults)
        advances: list[Advance] = []
        for piece in plan.slices:
            s = self.running[piece.sequence]
            if s.number in self._ended:
                continue
            if s.number in faults:
                advances.append(Advance(s.number, (), "error", faults[s.number]))
                self._ended[s.number] = s
                continue
            s.computed = piece.start + piece.length
            advance = self._gain(s, piece, gained.get(s.number, ()), now)
            if advance is not None:
                advances.append(advance)
                if advance.finish is not None:
                    self._ended[s.number] = s
            if self.config.prefix_cache and not s.one_shot:
                s.table.index(self.device, s.tokens, s.computed)
        return tuple(advances)

    def _gain(self, s: Sequence, piece: Slice, tokens: tuple[int, ...], now: float) -> Advance | None:
        """Append new tokens until one ends the sequence."""
        if not piece.samples:
            return None
        if s.one_shot:
            return Advance(s.number, (), "stop")
        request = s.request
        finish: str | None = None
        kept: list[int] = []
        for token in tokens:
            made = s.generated + len(kept)
            if token in request.ends and made >= request.min_new:
                finish = "stop"
                break
            kept.append(token)
            if made + 1 >= s.limit:
                finish = "length"
                break
        s.tokens.extend(kept)
        s.computed += max(0, len(kept) - 1)
        s.known += len(kept)
        if kept and not s.generated:
            s.first_s = now
        s.last_s = now
        s.generated += len(kept)
        s.due_s = s.first_s + (s.generated + 1) * s.tpot_s
        self._charge(s, self.config.w_out * len(kept))
        return Advance(s.number, tuple(kept), finish)

    def _bury(self) -> None:
        """Take ended sequences out of the books; the next plan tells the runner."""
        for s in self._ended.values():
            self._refund(s)
            if s.state is State.WAITING:
                self.backlog.remove(s)
            elif s.state is State.PARKED:
                del self.parked[s.number]
                self.host.release(s.host)
            else:
                del self.running[s.number]
                computed = s.computed if self.config.prefix_cache and not s.one_shot else 0
                s.table.retire(self.device, s.tokens, computed)
                if s.generated:
                    self.forecast.observe(s.tier, s.generated)
            del self._all[s.number]
            group = self._groups[s.request.group]
            group.remove(s)
            if not group:
                del self._groups[s.request.group]
            self.book.leave(s.tier, s.tenant)
            self.dropping.append(s.number)
        self._ended.clear()

    def _observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Teach the cost model what this step took."""
        if not plan.slices or plan.parks or plan.restores:
            return
        self.cost.observe(Load.of(plan.slices), outcome.seconds)

    # Charges -----------------------------------------------------------------------------------------------------

    def _charge_prompt(self, s: Sequence) -> None:
        """The whole prompt when admitted, less what the cache served. The queue has charged the full price already."""
        config = self.config
        cost = -config.w_in * (1.0 - config.w_cached) * s.cached
        if not self.book.shared:
            full = config.w_in * s.billed
            s.by_floor = s.by_floor or self.book.due(s.tier, full)
            cost += full
        self._charge(s, cost)

    def _refund(self, s: Sequence) -> None:
        """What was charged of the prompt of an ended sequence and never computed (nor served by the cache)."""
        if not s.generated and (s.state is not State.WAITING or self.book.shared):
            missing = s.billed - s.computed
            if missing > 0:
                self._charge(s, -self.config.w_in * missing)

    def _charge(self, s: Sequence, cost: float) -> None:
        self.book.charge(s.tier, s.tenant, s.request.weight, cost, self.backlog.tiers())
