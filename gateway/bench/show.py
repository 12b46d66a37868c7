"""Figures for people: tables on the screen, a progress bar, and pictures where matplotlib happens to be installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.bench.drive import OnTrace
from gateway.bench.metrics import P99_NEEDS, Report, Slo, Spread, Summary, Trace

__all__ = ["plot", "progress", "runs_table", "tenants_table"]

SPREADS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("gap, pooled", "gap_ms"), ("longest stall", "stall_ms"))


def runs_table(reports: Sequence[Report], slo: Slo | None) -> Table:
    """One column per run; a percentile that can't be known is a dash, never a number."""
    found = [r.summary(slo) for r in reports]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("")
    for report in reports:
        table.add_column(report.label + (" (stopped)" if report.interrupted else ""), justify="right")
    table.add_row("requests ok / offered", *(f"{s.ok} / {s.offered}" for s in found))
    if any(s.ok < s.offered for s in found):
        table.add_row(
            "refused / failed / abandoned", *(f"{s.refused} / {s.failed} / {s.abandoned}" for s in found), style="red"
        )
    table.add_row("duration, s", *(f"{s.duration_s:.1f}" for s in found))
    table.add_row("output tok/s", *(f"{s.output_per_s:.1f}" for s in found), style="bold")
    table.add_row("total tok/s", *(_number(s.total_per_s) for s in found))
    table.add_row("tokens in / out", *(f"{_count(s.prompt_tokens)} / {s.output_tokens}" for s in found))
    if any(s.cached_tokens for s in found):
        table.add_row("of them cached", *(f"{s.cached_tokens}" for s in found))
    for name, attribute in SPREADS:
        table.add_row(f"{name} p50 / p95, ms", *(_two(getattr(s, attribute)) for s in found))
        if any(_p99(s, attribute) is not None for s in found):
            table.add_row(f"{name} p99, ms", *(_number(_p99(s, attribute)) for s in found))
    if slo:
        table.add_row("goodput", *(_percent(s.goodput) for s in found), style="bold")
        table.add_row("goodput, requests/s", *(_number(s.goodput_per_s, 2) for s in found))
    counts = sorted({s.counted_by for s in found if s.ok})
    table.caption = f"tokens counted by: {', '.join(counts) or 'none'}; p99 only from {P99_NEEDS} values"
    if (lag := max((s.send_lag_ms for s in found), default=0.0)) > 20:
        table.caption += f"\nthe client sent up to {lag:.0f} ms late: it, not the server, may be the limit"
    return table


def tenants_table(report: Report, slo: Slo | None) -> Table:
    """One row per tenant of one run."""
    table = Table(title=report.label, box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, title_justify="left")
    for column in ("tenant", "ok / offered", "output tok/s", "TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "goodput"):
        table.add_column(column, justify="left" if column == "tenant" else "right")
    for tenant in report.tenants():
        s = report.only(tenant).summary(slo)
        latencies = (_two(s.ttft_ms), _two(s.tpot_ms))
        table.add_row(tenant, f"{s.ok} / {s.offered}", f"{s.output_per_s:.1f}", *latencies, _percent(s.goodput))
    return table


@contextmanager
def progress(console: Console, label: str, total: int) -> Iterator[OnTrace]:
    """A bar that every finished request moves; the text says how much came out and what went wrong.

    Where no bar can be drawn, as in a log, a line for each quarter.
    """
    columns = (
        TextColumn("{task.description:>18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, said="")
        seen = {"tokens": 0, "bad": 0, "done": 0}
        quarters = {total * n // 4 for n in (1, 2, 3)} if not console.is_terminal else set()

        def on_trace(trace: Trace) -> None:
            seen["tokens"] += trace.output_tokens
            seen["bad"] += trace.ending != "ok"
            seen["done"] += 1
            if seen["done"] in quarters:
                console.print(f"  {label}: {seen['done']} of {total}", style="dim", highlight=False, markup=False)
            elapsed = bar.tasks[task].elapsed or 0.0
            rate = f"{seen['tokens'] / elapsed:.0f} tok/s" if elapsed > 0 else ""
            bar.update(task, advance=1, said=rate + (f", {seen['bad']} not ok" if seen["bad"] else ""))

        yield on_trace


def plot(reports: Sequence[Report], path: Path) -> None:
    """Cumulative distributions of TTFT, TPOT, gaps and stalls. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (name, attribute) in zip(axes.flat, SPREADS, strict=True):
        for report in reports:
            values = sorted(_values(report, attribute))
            axis.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post", label=report.label)
        axis.set(title=name, xlabel="ms", ylabel="share of requests" if attribute != "gap_ms" else "share of gaps")
        axis.set_xscale("symlog", linthresh=1)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _values(report: Report, attribute: str) -> list[float]:
    good = [t for t in report.traces if t.ending == "ok"]
    if attribute == "gap_ms":
        return [1000 * gap for t in good for gap in t.gaps_s]
    seconds = (getattr(t, attribute.replace("_ms", "_s")) for t in good)
    return [1000 * s for s in seconds if s is not None]


def _p99(summary: Summary, attribute: str) -> float | None:
    spread: Spread | None = getattr(summary, attribute)
    return spread.p99 if spread else None


def _two(spread: Spread | None) -> str:
    return f"{spread.p50:.1f} / {spread.p95:.1f}" if spread else "–"


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
