"""A against B on one machine: alternating pairs of runs, and the median of the paired ratios.

Machines drift (heat, neighbours, caches); two runs minutes apart differ more than most changes do. A pair shares its
minute and its prompts, the order turns from pair to pair, and a median forgets the pair in which a neighbour woke up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from gateway.bench.metrics import Report, Slo, Summary
from gateway.bench.quotients import quotients

__all__ = ["METRICS", "Pair", "Ratio", "ratios", "ratios_table", "run_pairs"]

METRICS = (
    ("output tok/s", "more", "output_per_s"),
    ("total tok/s", "more", "total_per_s"),
    ("TTFT p50, ms", "less", "ttft_ms.p50"),
    ("TTFT p95, ms", "less", "ttft_ms.p95"),
    ("TPOT p50, ms", "less", "tpot_ms.p50"),
    ("TPOT p95, ms", "less", "tpot_ms.p95"),
    ("longest stall p95, ms", "less", "stall_ms.p95"),
    ("goodput", "more", "goodput"),
)
"""Name, which direction is better, and where the figure is in a summary."""
PAIRS_NEEDED = 5
"""With fewer, chance alone makes all pairs agree too often."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each, on the same prompts, one right after the other."""

    a: Report
    b: Report


@dataclass(frozen=True, slots=True)
class Ratio:
    """A / B of one metric over the pairs where both measured it."""

    name: str
    better: str
    a: float
    b: float
    """Medians over the pairs, for orientation; the ratio is not their quotient."""
    ratio: float
    low: float
    high: float
    pairs: int


async def run_pairs(count: int, run: Callable[[str, int], Awaitable[Report]]) -> list[Pair]:
    """Call `run("a" or "b", pair)` in the order ab, ba, ab, ...; an interrupted run ends it without its pair."""
    pairs: list[Pair] = []
    for number in range(count):
        found: dict[str, Report] = {}
        for side in ("a", "b") if number % 2 == 0 else ("b", "a"):
            found[side] = await run(side, number)
            if found[side].interrupted:
                return pairs
        pairs.append(Pair(found["a"], found["b"]))
    return pairs


def ratios(pairs: Sequence[Pair], slo: Slo | None = None) -> list[Ratio]:
    """The median of the paired ratios A / B with their range, for every metric that was measured and isn't zero."""
    summaries = [(pair.a.summary(slo), pair.b.summary(slo)) for pair in pairs]
    rows = []
    for name, better, where in METRICS:
        if q := quotients((_figure(x, where), _figure(y, where)) for x, y in summaries):
            rows.append(Ratio(name, better, q.over, q.under, q.median, q.low, q.high, len(q.each)))
    return rows


def _figure(summary: Summary, where: str) -> float | None:
    outer, _, inner = where.partition(".")
    found = getattr(summary, outer)
    return getattr(found, inner) if inner and found is not None else found


def ratios_table(rows: Sequence[Ratio], names: tuple[str, str]) -> Table:
    """Printed so that the ratio can't be read without its spread."""
    a, b = names
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("")
    for column in (a, b, f"{a} / {b}", "range", "pairs"):
        table.add_column(column, justify="right")
    table.add_column("better")
    for r in rows:
        clear = r.pairs >= PAIRS_NEEDED and not r.low <= 1 <= r.high
        winner = "unclear" if not clear else a if (r.ratio > 1) == (r.better == "more") else b
        ratio, spread = f"{r.ratio:.2f}x", f"{r.low:.2f} … {r.high:.2f}"
        table.add_row(r.name, f"{r.a:.2f}", f"{r.b:.2f}", ratio, spread, str(r.pairs), winner)
    table.caption = f"medians; the ratio is that of each pair; unclear: pairs disagree, or fewer than {PAIRS_NEEDED}"
    return table
