"""A machine that does what plans say on blocks that remember their content, and finds every wrong one.

The next token is a function of all tokens before it, so what a sequence says can't depend on how it was scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduler import Scheduler
from engine.scheduler.contract import Advance, Request
from engine.scheduler.step import Sample, StepOutcome, StepPlan

VOCABULARY = 1000


def following(tokens: list[int]) -> int:
    """The token this machine's model says after `tokens`."""
    value = 7
    for token in tokens[-24:]:
        value = (value * 31 + token + 1) % 1_000_003
    return (value + len(tokens)) % VOCABULARY


def told(prompt: tuple[int, ...], count: int) -> list[int]:
    """The first `count` output tokens of an uninterrupted run."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


@dataclass
class Row:
    salt: str
    tokens: list[int]
    one_shot: bool
    table: list[int] = field(default_factory=list)
    computed: int = 0


class Machine:
    """Executes plans. KV of a position is (salt, all tokens up to it), so a stale or foreign block is seen."""

    def __init__(self, block_size: int, device_blocks: int, host_blocks: int, seconds: float = 0.02) -> None:
        self.size, self.seconds = block_size, seconds
        self.device: list[dict[int, int]] = [{} for _ in range(device_blocks)]
        self.host: list[dict[int, int]] = [{} for _ in range(host_blocks)]
        self.rows: dict[int, Row] = {}
        self.hosted: dict[int, int] = {}
        self.tokens_computed = 0

    def add(self, request: Request) -> None:
        self.rows[request.sequence] = Row(request.salt, list(request.prompt), request.max_new == 0)

    def _mark(self, row: Row, position: int) -> int:
        return hash((row.salt, tuple(row.tokens[: position + 1])))

    def execute(self, plan: StepPlan) -> StepOutcome:
        for drop in plan.drops:
            self.rows.pop(drop.sequence, None)
        reading: set[int] = set()
        for park in plan.parks:
            row = self.rows[park.sequence]
            assert list(park.device) == row.table[: len(park.device)]
            for device, host in zip(park.device, park.host, strict=True):
                self.host[host] = dict(self.device[device])
            reading.update(park.device)
            row.table, row.computed = [], park.computed
        self._enter(plan, reading)
        samples = []
        for piece in plan.slices:
            row = self.rows[piece.sequence]
            assert piece.length > 0 and piece.start == row.computed
            if not row.one_shot:
                self._compute(row, piece.start, piece.length)
            row.computed = piece.start + piece.length
            self.tokens_computed += piece.length
            if piece.samples and not row.one_shot:
                assert row.computed == len(row.tokens)
                token = following(row.tokens)
                row.tokens.append(token)
                samples.append(Sample(piece.sequence, (token,)))
        assert len({p.sequence for p in plan.slices}) == len(plan.slices)
        return StepOutcome(plan.step, tuple(samples), self.seconds)

    def _enter(self, plan: StepPlan, reading: set[int]) -> None:
        fresh: set[int] = set()

        def spend(blocks: tuple[int, ...]) -> None:
            assert not fresh.intersection(blocks), "a block was given to two in one plan"
            assert not reading.intersection(blocks), "a block was given away while a swap reads it"
            fresh.update(blocks)
            for block in blocks:
                self.device[block] = {}

        for restore in plan.restores:
            spend(restore.device)
            row = self.rows[restore.sequence]
            for host, device in zip(restore.host, restore.device, strict=False):
                self.device[device] = dict(self.host[host])
            row.table, row.computed = list(restore.device), restore.computed
        copies = {(c.sequence, c.index): c for c in plan.copies}
        for start in plan.starts:
            row = self.rows[start.sequence]
            row.table, row.computed = list(start.blocks), start.cached
            kept = -(-start.cached // self.size)
            assert not fresh.intersection(start.blocks[:kept]), "a prefix hit on a block that was given away"
            spend(tuple(b for i, b in enumerate(start.blocks) if i >= kept and (start.sequence, i) not in copies))
        for extend in plan.extends:
            spend(extend.blocks)
            self.rows[extend.sequence].table.extend(extend.blocks)
        for copy in plan.copies:
            spend((copy.target,))
            self.device[copy.target] = dict(self.device[copy.source])
            self.rows[copy.sequence].table[copy.index] = copy.target

    def _compute(self, row: Row, start: int, length: int) -> None:
        size = self.size
        for position in range(start):
            kept = self.device[row.table[position // size]].get(position % size)
            assert kept == self._mark(row, position), f"position {position} holds something else"
        for position in range(start, start + length):
            self.device[row.table[position // size]][position % size] = self._mark(row, position)


class Bench:
    """A scheduler on a machine, with a clock of its own."""

    def __init__(self, scheduler: Scheduler, seconds: float = 0.02) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self.machine = Machine(config.block_size, config.device_blocks, config.host_blocks, seconds)
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.output: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.first: dict[int, float] = {}
        self.plans: list[StepPlan] = []

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request, self.now)
        self.machine.add(request)
        self.requests[request.sequence] = request
        self.output[request.sequence] = []

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        outcome = self.machine.execute(plan)
        self.now += outcome.seconds
        self.take(self.scheduler.commit(plan, outcome, self.now))
        self.plans.append(plan)
        return plan

    def take(self, advances: tuple[Advance, ...]) -> None:
        for advance in advances:
            assert advance.sequence not in self.finish, "an ended sequence advanced"
            if advance.tokens and not self.output[advance.sequence]:
                self.first[advance.sequence] = self.now
            self.output[advance.sequence].extend(advance.tokens)
            if advance.finish:
                self.finish[advance.sequence] = advance.finish

    def drain(self, limit: int = 10_000) -> None:
        """Step until idle; a deadlock is an AssertionError."""
        for _ in range(limit):
            if self.scheduler.idle:
                break
            plan = self.step()
            assert not plan.empty or self.scheduler.idle, "nothing planned while work waits"
        assert self.scheduler.idle, f"not idle after {limit} steps"
        self.scheduler.check()

    def verify(self) -> None:
        """Every finished sequence said what an uninterrupted run says."""
        for number, output in self.output.items():
            request = self.requests[number]
            assert output == told(request.prompt, len(output)), f"sequence {number} said something else"


def request(
    sequence: int,
    prompt: int | tuple[int, ...] = 20,
    max_new: int = 10,
    tier: int = 0,
    tenant: str = "a",
    arrival: float = 0.0,
    **more: object,
) -> Request:
    """A request with a prompt of its own (or the given ids) and the deadlines of its tier."""
    ids = prompt if isinstance(prompt, tuple) else tuple((sequence * 7919 + i * 13) % VOCABULARY for i in range(prompt))
    fields: dict[str, object] = {
        "sequence": sequence,
        "group": sequence,
        "tier": tier,
        "tenant": tenant,
        "prompt": ids,
        "max_new": max_new,
        "arrival_s": arrival,
        "ttft_deadline_s": arrival + (0.5, 2.0, 30.0)[tier],
        "tpot_s": (0.1, 0.2, 1.0)[tier],
        "salt": tenant,
    }
    fields.update(more)
    return Request(**fields)  # type: ignore[arg-type]
