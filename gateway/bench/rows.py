"""What single techniques of the engine are worth: each against its absence, on fresh stacks, in alternating pairs.

A row names its stacks (options of `sluice up`) and the variants measured on each; a measurement returns plain figures;
a quotient of two variants' figures is taken inside each pair. The order of stacks and variants turns from pair to pair.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.bench.client import Ask, Target
from gateway.bench.drive import run_closed, run_open
from gateway.bench.metrics import Report, Slo, percentile
from gateway.bench.server import finished
from gateway.bench.stacks import SLUICE, Stack
from gateway.bench.workload import Prompt, load, salted, share_prefix

__all__ = ["ROWS", "Figures", "Quotient", "Row", "Run"]

Figures = dict[str, Any]
ROWS_AT_A_TIME = 16


@dataclass(slots=True)
class Run:
    """One visit of a variant: where, which, and whether to stop."""

    stack: Stack
    variant: str
    pair: int
    seed: int
    stop: asyncio.Event
    scale: float = 1.0
    """Below 1: as much less work, to see that it runs; its figures say little."""

    def some(self, count: int, least: int = 2) -> int:
        return max(least, round(count * self.scale))

    def target(self, tenant: str = "alpha") -> Target:
        return replace(self.stack.target, keys=((tenant, self.stack.keys[tenant]),))

    def prompts(self, dataset: str, count: int, label: str, seed: int = 0) -> list[Prompt]:
        """The same for every variant of a pair, and for no other label."""
        words = load("words:4", 1, hash_seed(f"{label}/{self.pair}/{self.seed}"))[0].text
        return salted(load(dataset, count, self.seed + seed), words)

    async def closed(self, prompts: list[Prompt], users: int, ask: Ask, tenant: str = "alpha") -> Report:
        """A closed loop that ran to its end; raises Failed when a request didn't."""
        report = await run_closed(self.target(tenant), prompts, concurrency=users, ask=ask, stop=self.stop)
        return checked(report)


class Failed(Exception):
    """A measurement in which requests failed tells nothing; the message counts the reasons."""


class Stopped(Exception):
    """Ctrl-C in the middle of a measurement."""


@dataclass(frozen=True, slots=True)
class Quotient:
    """`over` / `under` of a figure, with what is wanted of it."""

    name: str
    figure: str
    over: str
    under: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of claims. `stacks`: options of `sluice up` and the variants measured on such a stack."""

    about: str
    minutes: float
    """For five pairs on two quiet cores, about."""
    stacks: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    measure: Callable[[Run], Awaitable[Figures]]
    quotients: tuple[Quotient, ...] = ()
    shown: tuple[str, ...] = ()
    """Figures of the table beside the quotients."""
    wanted: str = ""
    pooled: Callable[[dict[str, list[Figures]]], Figures] = field(default=lambda found: {})
    """Further figures of all pairs together, by variant."""


def engine(options: str) -> tuple[str, ...]:
    """Options of the engine, as `sluice up` takes them (joined with the caller's when the stack is started)."""
    return (f"--engine-options={options}",)


def hash_seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


def checked(report: Report) -> Report:
    summary = report.summary()
    if report.interrupted:
        raise Stopped
    if summary.ok < summary.offered:
        raise Failed(f"{summary.offered - summary.ok} of {summary.offered} requests failed: {summary.errors}")
    return report


# -- continuous, static, one at a time -------------------------------------------------------------------------------


_MEAN_REPLY, _LONGEST_REPLY = 222, 1286
"""Tokens, as of ShareGPT's replies, which vary as exponential lengths do: their deviation is 1.01 times their mean."""


async def batching(run: Run) -> Figures:
    """Output lengths are exponential. Static batching is the client's doing: sixteen, wait for all of them, the next
    sixteen. `static` computes every row until the longest reply of its batch ends, as a batch of fixed shape does, and
    counts what was asked for; `static, rows that end leave` doesn't compute what nobody asked for. All get the same
    requests: a few batches may happen to hold no long reply. One at a time needs fewer, since what it makes in a second
    does not depend on who comes with whom."""
    count = run.some(8 if run.variant == "one at a time" else 64, 4)
    if run.variant == "continuous":
        count = max(count, ROWS_AT_A_TIME + 8)  # some have to wait
    rng = random.Random(f"batching/{run.seed}/{run.pair}")
    lengths = [max(1, min(_LONGEST_REPLY, round(rng.expovariate(1 / _MEAN_REPLY)))) for _ in range(64)]
    prompts = run.prompts("words:16", 64, "batching")
    prompts = [replace(p, reply_tokens=n) for p, n in zip(prompts, lengths, strict=True)][:count]
    if run.variant.startswith("static"):
        return {"output_per_s": await static_rate(run, prompts)}
    report = await run.closed(prompts, ROWS_AT_A_TIME, Ask(_LONGEST_REPLY, follow_dataset=True))
    if run.variant == "one at a time":
        return {"output_per_s": report.summary().output_per_s}
    return {"output_per_s": full_rate(report, ROWS_AT_A_TIME)}


async def static_rate(run: Run, prompts: list[Prompt]) -> float:
    """Output tokens that were asked for per second, in batches that wait for their last."""
    tokens, seconds = 0, 0.0
    for first in range(0, len(prompts), ROWS_AT_A_TIME):
        batch = prompts[first : first + ROWS_AT_A_TIME]
        tokens += sum(p.reply_tokens for p in batch)
        if run.variant == "static":
            longest = max(p.reply_tokens for p in batch)
            batch = [replace(p, reply_tokens=longest) for p in batch]
        report = await run.closed(batch, ROWS_AT_A_TIME, Ask(_LONGEST_REPLY, follow_dataset=True))
        seconds += report.summary().duration_s
    return tokens / seconds


def full_rate(report: Report, rows: int) -> float:
    """Output tokens per second while all rows are taken: from when the first `rows` requests all have a token until
    the last request is sent. In that time as many prompts are computed as replies end; counted from the start there
    would be a prompt for each row whose reply is then not counted to its end."""
    end_s = max(t.sent_s for t in report.traces)
    begin_s = max(t.chunks_s[0] for t in report.traces if t.index < rows and t.chunks_s)
    if begin_s >= end_s:  # so few requests that the rows were never all taken
        begin_s = 0.0
    parts = (
        (t.output_tokens, sum(begin_s < c <= end_s for c in t.chunks_s) / max(1, len(t.chunks_s)))
        for t in report.traces
    )
    return sum(tokens * part for tokens, part in parts) / (end_s - begin_s)


# -- the prefix cache ------------------------------------------------------------------------------------------------


async def prefix(run: Run) -> Figures:
    """Four groups that share 384 words each. First one user alone (TTFT), then sixteen (throughput, 32 tokens out)."""
    prompts = share_prefix(
        run.prompts("words:16", 4 + run.some(12) + run.some(48), "prefix"), 4, 384, run.seed + run.pair
    )
    await run.closed(prompts[:4], 1, Ask(4))
    alone = await run.closed(prompts[4 : 4 + run.some(12)], 1, Ask(8))
    full = await run.closed(prompts[4 + run.some(12) :], ROWS_AT_A_TIME, Ask(32))
    one, many = alone.summary(), full.summary()
    texts = [t.text for r in (alone, full) for t in sorted(r.traces, key=lambda t: t.index)]
    return {
        "ttft_ms": one.ttft_ms.p50 if one.ttft_ms else None,
        "output_per_s": many.output_per_s,
        "cached_share": many.cached_tokens / (many.prompt_tokens or 1),
        "texts": [hashlib.sha256(t.encode()).hexdigest()[:12] for t in texts],
    }


def same_text(found: dict[str, list[Figures]]) -> Figures:
    """Share of replies that are equal, letter for letter, with and without the cache."""
    pairs = [
        x == y
        for on, off in zip(found["cache"], found["no cache"], strict=True)
        for x, y in zip(on["texts"], off["texts"], strict=True)
    ]
    return {"same text": f"{sum(pairs)} of {len(pairs)}"} if pairs else {}


# -- chunked prefill -------------------------------------------------------------------------------------------------


_ONLY_TEXT = {"logit_bias": {"0": -100, "1": -100, "2": -100}}
"""The model's control tokens, which a stream doesn't show: two steps with one between them would look like a stall."""


async def stall(run: Run) -> Figures:
    """Six streams that go on; once they run, four prompts of 1,536 words come one after another."""
    streams, long = run.prompts("words:16", 6, "streams"), run.prompts("words:1536", run.some(4), "long")
    async with Backlog(run, "alpha", streams, 6, Ask(3000, extra=_ONLY_TEXT)) as background:
        await asyncio.sleep(1.5)  # part of the workload: every stream has begun by then
        late = await run.closed(long, 1, Ask(2))
    stalls = [t.stall_s or 0.0 for t in background.report.traces]
    ttft = late.summary().ttft_ms
    return {"longest_stall_ms": 1000 * max(stalls), "long_ttft_ms": ttft.p50 if ttft else None}


# -- preemption ------------------------------------------------------------------------------------------------------


async def attainment(run: Run) -> Figures:
    """Jobs of the batch tier fill all rows and queue behind; interactive requests come at 0.7/s, 20 of them."""
    async with Backlog(run, "gamma", run.prompts("words:100", 600, "jobs"), 48, Ask(300)):
        await asyncio.sleep(3.0)  # part of the workload: the rows are full by then
        prompts = run.prompts("words:100", run.some(20), "chat")
        report = await run_open(
            run.target("alpha"), prompts, rate=0.7, seed=run.seed + run.pair, ask=Ask(32), stop=run.stop
        )
    if report.interrupted:
        raise Stopped
    s = report.summary(Slo(ttft_ms=2000, tpot_ms=150))
    return {"attained": s.goodput, "ttft_p95_ms": s.ttft_ms.p95 if s.ttft_ms else None, "offered": s.offered}


# -- a noisy neighbour -----------------------------------------------------------------------------------------------


async def neighbour(run: Run) -> Figures:
    """A quiet tenant, 1 request/s of 100 words and 16 tokens, alone and while another of its tier keeps 64 open."""
    prompts = run.prompts("words:100", run.some(30), f"quiet/{run.variant}")
    quiet = run_open(run.target("beta"), prompts, rate=1.0, seed=run.seed + run.pair, ask=Ask(16), stop=run.stop)
    if run.variant == "alone":
        report = checked(await quiet)
        step_ms = 0.0
    else:
        async with Backlog(run, "delta", run.prompts("words:100", 2000, "flood"), 64, Ask(64)) as flood:
            await asyncio.sleep(3.0)  # part of the workload: the flood has filled what it can
            report = checked(await quiet)
        gaps = sorted(gap for t in flood.report.traces for gap in t.gaps_s)
        step_ms = 1000 * percentile(gaps, 0.5) if gaps else 0.0
    ttft = [1000 * t.ttft_s for t in report.traces if t.ttft_s is not None]
    s = report.summary()
    return {"ttft_p95_ms": s.ttft_ms.p95 if s.ttft_ms else None, "step_ms": step_ms, "ttfts_ms": ttft}


def beyond_a_step(found: dict[str, list[Figures]]) -> Figures:
    """Over all pairs together: (p95 under the flood - one step of it) / p95 alone."""
    alone, flooded = (sorted(x for run in found[v] for x in run["ttfts_ms"]) for v in ("alone", "flood"))
    if not alone or not flooded:
        return {}
    steps = sorted(run["step_ms"] for run in found["flood"])
    a, f, step = percentile(alone, 0.95), percentile(flooded, 0.95), percentile(steps, 0.5)
    return {
        "p95 TTFT of all pairs, alone / flood": f"{a:.0f} / {f:.0f} ms",
        "a step of the flood": f"{step:.0f} ms",
        "p95 less one step, flood / alone": f"{(f - step) / a:.2f}",
    }


class Backlog:
    """A tenant's closed loop in the background; leaving the block hangs up on what is left of it."""

    def __init__(self, run: Run, tenant: str, prompts: list[Prompt], users: int, ask: Ask) -> None:
        self._stop = asyncio.Event()
        self.report = Report(tenant)
        self._work = run_closed(run.target(tenant), prompts, concurrency=users, ask=ask, stop=self._stop)

    async def __aenter__(self) -> Backlog:
        self._task = asyncio.create_task(self._work)
        return self

    async def __aexit__(self, *error: object) -> None:
        ran_out = self._task.done()
        self._stop.set()
        self.report = await self._task
        if ran_out and error[0] is None:
            raise Failed(f"the backlog ran out (or failed) before the end: {self.report.summary().errors}")


# -- KV memory -------------------------------------------------------------------------------------------------------


async def waste(run: Run) -> Figures:
    """ShareGPT-like prompts, 16 users; once a second the engine's own word on its KV memory, while 8 or more run."""
    work = asyncio.create_task(run.closed(run.prompts("sharegpt-like", run.some(96), "waste"), ROWS_AT_A_TIME, Ask(64)))
    seen: list[float] = []
    while not work.done():
        for e in (await _status(run.stack))["engines"]:
            held = (e["kv_blocks"] - e["kv_free"] - e["kv_cached"]) * e["block_size"]
            if e["running"] >= ROWS_AT_A_TIME // 2 and held:
                seen.append(e["kv_unwritten"] / held)
        await asyncio.wait({work}, timeout=1.0)
    await work
    if not seen:
        raise Failed("it was over before the engine told of its memory under load")
    return {"kv_waste": sum(seen) / len(seen), "kv_waste_p50": percentile(sorted(seen), 0.5), "kv_waste_max": max(seen)}


async def _status(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await finished([*SLUICE, "status", "--json", f"--data-dir={stack.data_dir}"]))
    return found


# -- start -----------------------------------------------------------------------------------------------------------


async def start(run: Run) -> Figures:
    """`sluice up --detach` on a data folder that has been up before, to its return; then one request, to be sure."""
    await run.closed(run.prompts("words:16", 1, "start"), 1, Ask(2))
    return {"start_s": run.stack.start_s}


SIXTEEN = f"--max-rows {ROWS_AT_A_TIME}"
ROWS = {
    "batching": Row(
        f"continuous batching against static and one at a time; exponential lengths of output (mean {_MEAN_REPLY})",
        35,
        (
            (engine(f"{SIXTEEN} --express-rows 0"), ("continuous", "static", "static, rows that end leave")),
            (engine("--max-rows 1"), ("one at a time",)),
        ),
        batching,
        (
            Quotient("continuous / static, output tok/s", "output_per_s", "continuous", "static", ">= 2.5"),
            Quotient(
                "continuous / static whose ended rows leave, output tok/s",
                "output_per_s",
                "continuous",
                "static, rows that end leave",
                "",
            ),
            Quotient("continuous / one at a time, output tok/s", "output_per_s", "continuous", "one at a time", ">= 4"),
        ),
        ("output_per_s",),
    ),
    "prefix": Row(
        "prefix cache on and off; 4 groups that share 384 words each",
        6,
        ((engine(""), ("cache",)), (engine("--no-prefix-cache"), ("no cache",))),
        prefix,
        (
            Quotient("TTFT alone, no cache / cache", "ttft_ms", "no cache", "cache", ">= 6"),
            Quotient("saturated output tok/s, cache / no cache", "output_per_s", "cache", "no cache", ">= 2"),
        ),
        ("ttft_ms", "output_per_s", "cached_share"),
        pooled=same_text,
    ),
    "stall": Row(
        "longest stall of six streams while prompts of 1,536 words come; chunked against whole prefill",
        5,
        ((engine(""), ("chunked",)), (engine("--whole-prefill"), ("whole",))),
        stall,
        (Quotient("longest stall, whole / chunked", "longest_stall_ms", "whole", "chunked", ">= 6"),
         Quotient("TTFT of the long prompts, chunked / whole", "long_ttft_ms", "chunked", "whole", "")),
        ("longest_stall_ms", "long_ttft_ms"),
    ),
    "attainment": Row(
        "interactive requests (TTFT 2 s, TPOT 150 ms) over batch jobs that queue; 16 rows, preemption on and off",
        8,
        ((engine(SIXTEEN), ("preemption",)), (engine(f"{SIXTEEN} --no-preemption"), ("none",))),
        attainment,
        shown=("attained", "ttft_p95_ms"),
        wanted="attained with preemption >= 95 %",
    ),
    "neighbour": Row(
        "a quiet tenant's TTFT alone and under a flood of another tenant of its tier; 16 rows",
        8,
        ((engine(SIXTEEN), ("alone", "flood")),),
        neighbour,
        (Quotient("p95 TTFT, flood / alone", "ttft_p95_ms", "flood", "alone", "<= 1.5, plus one step"),),
        ("ttft_p95_ms", "step_ms"),
        pooled=beyond_a_step,
    ),
    "waste": Row(
        "part of the KV memory in use that holds no token, as the engine tells it under load",
        3,
        ((engine(""), ("load",)),),
        waste,
        shown=("kv_waste", "kv_waste_p50", "kv_waste_max"),
        wanted="< 4 %",
    ),
    "start": Row(
        "`sluice up --detach` to its return, with a warm cache",
        2,
        ((engine(""), ("start",)),),
        start,
        shown=("start_s",),
        wanted="< 8 s",
    ),
}  # fmt: skip
