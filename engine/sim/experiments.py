"""The experiments behind docs/scheduling.md. Each returns rows of one table; all are seeded and need no network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from engine.protocol.fair import UNIT
from engine.scheduler import SchedulerConfig, create
from engine.scheduler.contract import Request
from engine.scheduler.step import Sample, StepOutcome
from engine.sim.report import percentile, summary
from engine.sim.workload import Source, stream
from engine.sim.world import COSTS, END, World

__all__ = ["EXPERIMENTS"]

Rows = list[dict[str, Any]]
BASE = SchedulerConfig(device_blocks=2048, max_rows=16, max_step_tokens=512, prefix_cache=False)


def _find(world: World, who: str) -> dict[str, Any]:
    return next(row for row in summary(world)["rows"] if row["who"] == who)


def batching() -> Rows:
    """Continuous against static batching and one at a time: exponential lengths, 16 rows, everything there at once."""
    source = [Source("a", 1, 1.0, 400, "backlog", "exponential")]
    rows = []
    kinds = (("one at a time", replace(BASE, max_rows=1), False), ("static", BASE, True), ("continuous", BASE, False))
    for name, config, static in kinds:
        world = World(replace(config, express_rows=0), "fcfs", static=static).run(stream(source))
        rows.append({"batching": name, "tokens_per_s": _find(world, "standard")["tokens_per_s"]})
    for row in rows:
        row["against static"] = row["tokens_per_s"] / rows[1]["tokens_per_s"]
    return rows


def chunking() -> Rows:
    """Prompts of 768 tokens into six running streams: chunks sized by slack against whole prefill."""
    sources = [Source(f"s{i}", 0, 1.0, 1, "backlog", "16/400") for i in range(6)]
    sources.append(Source("long", 0, 1 / 4.0, 5, "uniform", "768/2"))
    rows = []
    whole = replace(BASE, whole_prefill=True, adaptive_chunk=False)
    for name, config in (("whole", whole), ("chunked", BASE)):
        world = World(config, "tiered", front=False).run(stream(sources))
        streams = [life for life in world.lives.values() if life.arrival.tenant != "long"]
        ttft = [life.ttft_s for life in world.lives.values() if life.arrival.tenant == "long"]
        rows.append({"prefill": name, "longest_stall_s": max(s.stall_s for s in streams), "long_ttft_s": median(ttft)})
    return rows


def preemption() -> Rows:
    """Interactive requests onto a batch backlog: FIFO, strict order without eviction, and with it."""
    sources = [Source("jobs", 2, 1.0, 160, "backlog", "200/300"), Source("chat", 0, 0.5, 150, "poisson", "100/40")]
    rows = []
    config = replace(BASE, host_blocks=2048, block_bytes=368_640)
    for name, policy, preempt in (
        ("FIFO", "fcfs", False),
        ("priority", "priority", False),
        ("preempt", "tiered", True),
    ):
        world = World(replace(config, preempt=preempt), policy, front=False).run(stream(sources))
        batch = [life.last_s for life in world.lives.values() if life.arrival.tier == 2]
        row = _find(world, "interactive")
        rows.append({"policy": name, "interactive attained": row["attained"], "ttft_p95_s": row["ttft_p95_s"],
                     "batch_makespan_s": max(batch)})  # fmt: skip
    for row in rows:
        row["against FIFO"] = row["batch_makespan_s"] / rows[0]["batch_makespan_s"]
    return rows


def neighbour() -> Rows:
    """Four quiet tenants beside one that floods; their p99 TTFT against the same traffic alone."""
    rows = []
    for cost, batch, rate, lengths, count, load in (
        ("gpu", 64, 2.0, "azure", 300, 200.0),
        ("cpu", 16, 0.5, "exponential", 300, 10.0),
    ):
        quiet = [Source(f"quiet{i}", 0, rate, count, "poisson", lengths) for i in range(4)]
        span = count / rate
        flood = Source("flood", 0, load, int(load * span), "poisson", "exponential")
        config = replace(BASE, max_rows=batch, device_blocks=100 * batch, max_step_tokens=1024)
        alone: float | None = None
        for name, policy, sources in (("alone", "tiered", quiet), ("FIFO", "fcfs", None), ("tiered", "tiered", None)):
            world = World(config, policy, front=policy == "tiered", truth=COSTS[cost])
            world.run(stream(sources or [*quiet, flood]), until_s=span)
            lives = [life for life in world.lives.values() if life.arrival.tenant != "flood"]
            ttft = [life.ttft_s for life in lives if life.first_s >= 0.0]
            p50, p99 = percentile(ttft, 0.5), percentile(ttft, 0.99) or 0.0
            alone = alone or p99
            tokens = sum(life.tokens for life in world.lives.values()) / span
            rows.append({"machine": cost, "policy": name, "quiet_ttft_p50_s": p50, "quiet_ttft_p99_s": p99,
                         "p99 against alone": p99 / alone, "unserved": len(lives) - len(ttft),
                         "tokens_per_s": tokens})  # fmt: skip
    return rows


def weights() -> Rows:
    """Three backlogged tenants of weights 1, 2 and 4 on four engines, over 1,000,000 weighted tokens."""
    sources = [Source(f"w{w}", 1, 1.0, 600 * w, "backlog", "sharegpt", weight=float(w)) for w in (1, 2, 4)]
    world = World(replace(BASE, max_rows=32), engines=4, truth=COSTS["gpu"])

    def served() -> list[float]:
        return [world.queue.counters.get(("standard", s.tenant), 0) * s.weight / UNIT for s in sources]

    def enough(done: int) -> None:
        world.stopped = done > 100 and sum(served()) >= 1e6

    world.run(stream(sources), progress=enough)
    total = sum(served())
    return [{"tenant": s.tenant, "weight": s.weight, "tokens": tokens, "share": tokens / total,
             "error": tokens / total / (s.weight / 7) - 1.0}
            for s, tokens in zip(sources, served(), strict=True)]  # fmt: skip


def overload() -> Rows:
    """Requests per second that meet their targets, of those offered in 100 s, at rising load.

    About 8/s can be computed at all. "queued" is `tiered` behind the fair queue; the others hold all that waits.
    """
    rows, span = [], 100.0
    for load in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        row: dict[str, Any] = {"load": load, "offered_per_s": 8.0 * load}
        for name in ("fcfs", "priority", "deadline", "tiered", "queued"):
            policy, front = ("tiered", True) if name == "queued" else (name, False)
            sources = [Source(f"t{i}", 0, 2.0 * load, int(2.0 * load * span), "poisson", "100/40") for i in range(4)]
            world = World(BASE, policy, front=front).run(stream(sources), until_s=span)
            row[name] = sum(life.met for life in world.lives.values()) / span
        rows.append(row)
    return rows


def prefixes() -> Rows:
    """Hot prompts that share 512 tokens beside 5 % cold ones, at full load: who does the waiting?"""
    hot = Source("hot", 1, 9.5, 1900, "poisson", "32/30", prefix="system", shared=512)
    cold = Source("cold", 1, 0.5, 100, "poisson", "544/30")
    rows = []
    for policy in ("fcfs", "deadline", "tiered"):
        world = World(replace(BASE, prefix_cache=True), policy, front=False).run(stream([hot, cold]))
        waits = {name: [v.ttft_s for v in world.lives.values() if v.arrival.tenant == name] for name in ("hot", "cold")}
        part = sum(waits["cold"]) / sum(map(sum, waits.values()))
        rows.append({"policy": policy, "hot_ttft_p50_s": median(waits["hot"]), "cold_ttft_p50_s": median(waits["cold"]),
                     "cold_ttft_p99_s": percentile(waits["cold"], 0.99), "cold part of all waiting": part})  # fmt: skip
    return rows


def swapping() -> Rows:
    """Batch jobs evicted by chat: by swap, by recompute, or by price, at three link bandwidths: end of the jobs."""
    sources = [Source("jobs", 2, 1.0, 60, "backlog", "1000/200"), Source("chat", 0, 0.7, 150, "gamma", "100/20")]
    rows = []
    for link in (2e7, 1e8, 8e9):
        row: dict[str, Any] = {"link_bytes_per_s": f"{link:.0e}"}
        for mode in ("swap", "recompute", "price"):
            host, believed = (0 if mode == "recompute" else 4000), (1e15 if mode == "swap" else link)
            config = replace(BASE, max_rows=8, host_blocks=host, swap_bytes_per_s=believed, block_bytes=368_640)
            world = World(config, "tiered", front=False, link=link).run(stream(sources))
            row[f"{mode}_s"] = max(life.last_s for life in world.lives.values() if life.arrival.tier == 2)
            if mode == "price":
                parks, swaps = sum(v.parks for v in world.lives.values()), summary(world)["swaps"]
                row |= {"swaps": swaps, "recomputes": parks - swaps}
        row["price against the better"] = row["price_s"] / min(row["swap_s"], row["recompute_s"])
        rows.append(row)
    return rows


def plan_time() -> Rows:
    """CPU time of `plan` alone, with 256 running and more and more waiting; and when those who run may be evicted."""
    rows = []
    for waiting in (100, 300, 1000, 3000, 10_000):
        kept, evictable = _plan_times(waiting, 0), _plan_times(waiting, 2)
        rows.append({"waiting": waiting, "median_ms": 1e3 * median(kept),
                     "p95_ms": 1e3 * (percentile(kept, 0.95) or 0.0), "evictable_median_ms": 1e3 * median(evictable),
                     "evictable_p95_ms": 1e3 * (percentile(evictable, 0.95) or 0.0)})  # fmt: skip
    return rows


def _plan_times(waiting: int, running: int) -> list[float]:
    """Seconds of 60 plans while 256 of the tier `running` run.

    Where those who wait may evict them, it is one plan again and again: committed, it would leave nobody to evict.
    """
    config = SchedulerConfig(device_blocks=16_384, max_rows=256, max_step_tokens=1024, prefix_cache=True)
    scheduler = create("tiered", config)

    def submit(first: int, count: int) -> None:
        for i in range(first, first + count):
            tier, prompt = i % 3 if i >= 256 else running, tuple(range(i * 131, i * 131 + 100))
            scheduler.submit(Request(i, i, tier, f"t{i % 40}", prompt, 400, 0.0, 1e9 + i, 0.1, salt=f"t{i % 40}"), 0.0)

    submit(0, 256)
    if not running:
        submit(256, waiting)
    now, times = 0.0, []
    for step in range(160):
        if running and step == 100:
            submit(256, waiting)
        begin = time.process_time()
        plan = scheduler.plan(now)
        times.append(time.process_time() - begin)
        if running and step >= 100:
            continue
        samples = tuple(Sample(s.sequence, (END + 1,)) for s in plan.slices if s.samples)
        now += 0.05
        scheduler.commit(plan, StepOutcome(step, samples, 0.05), now)
    return times[-60:]


EXPERIMENTS: dict[str, Callable[[], Rows]] = {
    f.__name__.replace("_", "-"): f
    for f in (batching, chunking, preemption, neighbour, weights, overload, prefixes, swapping, plan_time)
}
