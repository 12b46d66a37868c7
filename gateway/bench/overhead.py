"""What the gateway itself costs, in front of an engine of known cost: latency, event rate, memory of a stream."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from gateway.bench.client import Ask, Target
from gateway.bench.drive import OnTrace, run_closed
from gateway.bench.metrics import Report
from gateway.bench.workload import Prompt

__all__ = ["Cost", "costs_table", "measure"]

SAMPLE_S = 0.05
MEMORY_NEEDS = 20
"""Streams below which growth is the allocator's and the caches', not the streams'."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One level. `kib_per_stream`: growth of the gateway's peak resident memory, shared over the open streams.
    `cpu_us_per_event`: processor time of the gateway for all it did, opening the streams too, shared over the events;
    it says the same on a busy machine, where latencies say nothing."""

    streams: int
    report: Report
    events_per_s: float
    kib_per_stream: float | None
    cpu_us_per_event: float | None = None


async def measure(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    streams: int,
    ask: Ask,
    pid: int | None = None,
    stop: asyncio.Event | None = None,
    on_trace: OnTrace | None = None,
) -> Cost:
    """Hold `streams` streams open until all prompts are served; with `pid` watch that process's memory meanwhile.

    Memory says something only on the first visit to a level: a process seldom gives memory back.
    """
    before = resident_kib(pid) if pid else None
    busy = processor_s(pid) if pid else None
    peak = [before or 0]
    watcher = asyncio.create_task(_watch(pid, peak)) if pid and before is not None else None
    try:
        report = await run_closed(target, prompts, concurrency=streams, ask=ask, stop=stop, on_trace=on_trace)
    finally:
        if watcher:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
    good = [t for t in report.traces if t.ending == "ok"]
    duration = report.summary().duration_s
    count = sum(len(t.chunks_s) for t in good)
    spent = processor_s(pid) if pid else None
    return Cost(
        streams,
        report,
        count / duration if duration else 0.0,
        (peak[0] - before) / streams if before is not None else None,
        (spent - busy) / count * 1e6 if count and spent is not None and busy is not None else None,
    )


def processor_s(pid: int) -> float | None:
    """Processor time of a process on this machine so far, user and system; None where it can't be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kib(pid: int) -> int | None:
    """Resident memory of a process on this machine; None where it can't be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)


async def _watch(pid: int, peak: list[int]) -> None:
    while (now := resident_kib(pid)) is not None:
        peak[0] = max(peak[0], now)
        await asyncio.sleep(SAMPLE_S)


def costs_table(costs: Sequence[Cost], engine_ttft_ms: float) -> Table:
    """Added TTFT is what was measured less what the engine is known to take."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    latency = ("added TTFT p50, ms", "p95", "p99", "gap p50, ms")
    for column in ("streams", "ok / offered", *latency, "SSE events/s", "CPU µs/event", "KiB/stream"):
        table.add_column(column, justify="right")
    for cost in costs:
        s = cost.report.summary()
        ttft = (s.ttft_ms.p50, s.ttft_ms.p95, s.ttft_ms.p99) if s.ttft_ms else (None, None, None)
        added = ["–" if t is None else f"{t - engine_ttft_ms:.1f}" for t in ttft]
        gap = f"{s.gap_ms.p50:.2f}" if s.gap_ms else "–"
        known = cost.kib_per_stream is not None and cost.streams >= MEMORY_NEEDS
        memory = "–" if not known else f"{cost.kib_per_stream:.0f}"
        cpu = f"{cost.cpu_us_per_event:.0f}" if cost.cpu_us_per_event is not None else "–"
        table.add_row(str(cost.streams), f"{s.ok} / {s.offered}", *added, gap, f"{cost.events_per_s:.0f}", cpu, memory)
    table.caption = f"TTFT less {engine_ttft_ms:g} ms that the engine itself takes"
    return table
