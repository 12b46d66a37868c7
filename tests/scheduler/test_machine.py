"""Random histories: no deadlock, balanced books, no block shared wrongly, no word changed by how it was scheduled."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.scheduler import POLICIES, SchedulerConfig, create
from engine.scheduler.step import StepOutcome

from .machine import Bench, request


class History(RuleBasedStateMachine):
    bench: Bench
    number = 0

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        block_size=st.sampled_from([1, 2, 4]),
        device=st.integers(8, 40),
        host=st.sampled_from([0, 4, 60]),
        rows=st.integers(1, 6),
        tokens=st.integers(6, 24),
        flags=st.tuples(*[st.booleans()] * 5),
        link=st.sampled_from([1.0, 2e6, 1e12]),
        stay=st.sampled_from([0.0, 0.1]),
    )
    def build(
        self,
        policy: str,
        block_size: int,
        device: int,
        host: int,
        rows: int,
        tokens: int,
        flags: tuple[bool, ...],
        link: float,
        stay: float,
    ) -> None:
        config = SchedulerConfig(
            block_size=block_size,
            device_blocks=device,
            host_blocks=host,
            max_rows=rows,
            max_step_tokens=tokens,
            context_length=64,
            swap_bytes_per_s=link,
            block_bytes=4096,
            min_stay_s=stay,
            default_output=6,
            min_chunk=2,
            adaptive_chunk=flags[0],
            prefix_cache=flags[1],
            preempt=flags[2],
            forecast_output=flags[3],
            whole_prefill=flags[4],
            aging_every=3,
            patience_s=0.5,
            floor_quantum=30.0,
            deficit_cap=200.0,
            gate_tokens=50.0,
        )
        self.bench = Bench(create(policy, config))
        self.most = min(64, device * block_size)

    @rule(
        prompt=st.integers(1, 40),
        shared=st.booleans(),
        new=st.integers(0, 30),
        tier=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        n=st.sampled_from([1, 1, 1, 3]),
        crowd=st.sampled_from([1, 1, 2, 6]),
        end=st.sampled_from([0, 0, 3]),
    )
    def arrive(self, prompt: int, shared: bool, new: int, tier: int, tenant: str, n: int, crowd: int, end: int) -> None:
        for _ in range(crowd):
            self.one(min(prompt, self.most - 1), shared, new, tier, tenant, n, end)

    def one(self, prompt: int, shared: bool, new: int, tier: int, tenant: str, n: int, end: int) -> None:
        ids = tuple(range(prompt)) if shared else tuple((self.number * 31 + i) % 1000 for i in range(prompt))
        group = self.number
        for _ in range(n):
            self.number += 1
            ends = frozenset(range(0, 1000, end)) if end else frozenset()
            r = request(self.number, ids, new, tier, tenant, self.bench.now, group=group, ends=ends)
            self.bench.submit(r)

    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule(pick=st.integers(0, 100), inside=st.booleans(), late=st.booleans())
    def cancel(self, pick: int, inside: bool, late: bool) -> None:
        alive = [n for n in self.bench.requests if n not in self.bench.finish and n in self.bench.machine.rows]
        number = alive[pick % len(alive)] if alive else 1
        scheduler = self.bench.scheduler
        if not inside:
            scheduler.end(number, self.bench.now)
            return
        plan = scheduler.plan(self.bench.now)
        scheduler.end(number, self.bench.now)
        if late and plan.slices:
            faulty = plan.slices[pick % len(plan.slices)].sequence
            done = self.bench.machine.execute(plan)
            outcome = StepOutcome(done.step, done.samples, done.seconds, faults=((faulty, "nan"),))
        else:
            outcome = self.bench.machine.execute(plan)
        self.bench.now += outcome.seconds
        self.bench.take(scheduler.commit(plan, outcome, self.bench.now))

    @rule()
    def plans_are_pure(self) -> None:
        scheduler = self.bench.scheduler
        first = scheduler.plan(self.bench.now)
        for name in sorted(POLICIES):
            scheduler.propose(POLICIES[name](), self.bench.now)
        assert scheduler.plan(self.bench.now) == first

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain(4000)
            self.bench.verify()


History.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestHistory = History.TestCase
