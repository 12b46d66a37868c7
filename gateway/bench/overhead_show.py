"""What `overhead` found, as tables for a terminal and for a document, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gateway.bench.metrics import Spread
from gateway.bench.overhead import READERS, TPS, TTFT_S, UNREAD_TPS, Found, Idle, Run, Unread

__all__ = ["as_markdown", "rows", "show", "to_dict"]


def show(found: Found, console: Console) -> None:
    """All of it."""
    if found.runs:
        console.print(_added_table(found))
    for i in found.idle:
        memory = f"{i.before_mib:.0f} -> {i.with_mib:.0f} MiB, {i.kib_per_stream:.0f} KiB each"
        console.print(f"{i.front}: {i.streams} idle streams, {memory}", highlight=False)
    if found.unread:
        console.print(_unread_table(found.unread))
    for run in found.runs:
        for what, count in run.wrong.items():
            console.print(f"{run.front}, {run.streams} streams: {count} x {what}", style="red", markup=False)


def rows(runs: Sequence[Run], idle: Sequence[Idle]) -> list[dict[str, Any]]:
    """For each level and front what all its runs found together; memory beside every level of a front."""
    memory = {i.front: i.kib_per_stream for i in idle}
    found = []
    for streams, front in dict.fromkeys((r.streams, r.front) for r in runs):
        same = [r for r in runs if (r.streams, r.front) == (streams, front)]
        ttft, gap = Spread.of(t for r in same for t in r.ttft_s), Spread.of(g for r in same for g in r.gap_s)
        cores = [r.events_per_core for r in same if r.events_per_core is not None]
        found.append(
            {
                "streams": streams,
                "front": front,
                "runs": len(same),
                "requests": sum(r.requests for r in same),
                "wrong": sum(sum(r.wrong.values()) for r in same),
                "ttft_p50_ms": ttft.p50 if ttft else None,
                "ttft_p99_ms": ttft.p99 if ttft else None,
                "gap_p50_ms": gap.p50 if gap else None,
                "gap_p99_ms": gap.p99 if gap else None,
                "events_per_core": median(cores) if cores else None,
                "kib_per_stream": memory.get(front),
            }
        )
    return found


_COLUMNS = (
    ("streams", "streams", "d"),
    ("front", "", "s"),
    ("requests", "requests", "d"),
    ("ttft_p50_ms", "added TTFT p50, ms", ".1f"),
    ("ttft_p99_ms", "p99", ".1f"),
    ("gap_p50_ms", "added gap p50, ms", ".2f"),
    ("gap_p99_ms", "p99", ".1f"),
    ("events_per_core", "events/s per core", ",.0f"),
    ("kib_per_stream", "KiB/idle stream", ".0f"),
)


def _cells(row: dict[str, Any]) -> list[str]:
    return ["–" if row[key] is None else format(row[key], how) for key, _, how in _COLUMNS]


def _added_table(found: Found) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for _, title, how in _COLUMNS:
        table.add_column(title, justify="left" if how == "s" else "right")
    for row in rows(found.runs, found.idle):
        table.add_row(*_cells(row))
    table.caption = "all runs pooled; direct: the same client on the engine itself, with nothing between"
    return table


def _unread_table(found: Sequence[Unread]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for title in ("", "clients that read nothing", "pairs", "gap p99 alone, ms", "beside them", "ratio", "memory, MiB"):
        table.add_column(title, justify="right")
    for u in found:
        alone, beside = f"{median(u.alone_ms):.2f}", f"{median(u.beside_ms):.2f}"
        grown = f"+{max(u.grown_mib):.1f}"
        table.add_row(u.front, str(u.clients), str(len(u.alone_ms)), alone, beside, f"{u.ratio:.2f}", grown)
    table.caption = f"gaps of {READERS} readers at {UNREAD_TPS} tokens a second; the ratio is the median of the pairs'"
    return table


def as_markdown(found: Found) -> str:
    """The table of levels for a document."""
    head = [title or "in front of the engine" for _, title, _ in _COLUMNS]
    lines = [
        head,
        ["---" if how == "s" else "---:" for _, _, how in _COLUMNS],
        *map(_cells, rows(found.runs, found.idle)),
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def to_dict(found: Found) -> dict[str, Any]:
    """Everything, JSON-able."""
    return {
        "ttft_ms": TTFT_S * 1000,
        "tokens_per_s": TPS,
        "levels": rows(found.runs, found.idle),
        "runs": [_brief(r) for r in found.runs],
        "idle": [asdict(i) | {"kib_per_stream": i.kib_per_stream} for i in found.idle],
        "unread": [asdict(u) | {"ratio": u.ratio} for u in found.unread],
    }


def _brief(run: Run) -> dict[str, Any]:
    """A run without its hundred thousand gaps."""
    ttft, gap = Spread.of(run.ttft_s), Spread.of(run.gap_s)
    brief = {k: v for k, v in asdict(run).items() if k not in ("ttft_s", "gap_s")}
    return brief | {"ttft_ms": asdict(ttft) if ttft else None, "gap_ms": asdict(gap) if gap else None}
