"""Several servers in turn, each fresh for every round, on the same prompts: what `sluice bench compare` does.

A round is one run of every contender at every level; the order of the contenders turns from round to round. A ratio is
taken inside a round and the median over the rounds is reported, so that a neighbour who wakes up spoils one round only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console

from gateway.bench.client import Ask, Unreachable
from gateway.bench.drive import run_closed
from gateway.bench.journal import Journal
from gateway.bench.quotients import quotients
from gateway.bench.show import progress
from gateway.bench.stacks import Place, Stack, serving
from gateway.bench.workload import Prompt

__all__ = ["Level", "Plan", "markdown", "run_rounds", "summary"]

FIGURES = (
    ("output tok/s", "output_per_s", ""),
    ("total tok/s", "total_per_s", ""),
    ("TTFT p50, ms", "ttft_ms", "p50"),
    ("TPOT p50, ms", "tpot_ms", "p50"),
    ("start, s", "start_s", ""),
)


@dataclass(frozen=True, slots=True)
class Level:
    """A closed loop: so many users at a time, so many requests in all."""

    users: int
    requests: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `prompts(label, count)`: that many, the same for a label whoever is asked."""

    contenders: tuple[str, ...]
    levels: tuple[Level, ...]
    rounds: int
    ask: Ask
    prompts: Callable[[str, int], list[Prompt]]
    warmup: int = 8

    def order(self, number: int) -> tuple[str, ...]:
        return self.contenders if number % 2 == 0 else self.contenders[::-1]


async def run_rounds(plan: Plan, place: Place, journal: Journal, console: Console, stop: asyncio.Event) -> None:
    """Run what the journal has not whole. A contender that can't be started, or ends, is named and left for later."""
    for number in range(plan.rounds):
        for name in plan.order(number):
            missing = [level for level in plan.levels if not _whole(journal.runs.get(_key(number, name, level)))]
            if not missing or stop.is_set():
                continue
            console.print(f"round {number + 1} of {plan.rounds}: starting {name}", style="dim", highlight=False)
            try:
                async with serving(name, place, stop) as stack:
                    await _visit(plan, stack, journal, console, stop, (number, name, missing))
            except Unreachable as error:
                if not stop.is_set():
                    console.print(f"{name}: {error}", style="red", highlight=False, markup=False)


async def _visit(
    plan: Plan,
    stack: Stack,
    journal: Journal,
    console: Console,
    stop: asyncio.Event,
    what: tuple[int, str, list[Level]],
) -> None:
    number, name, levels = what
    warm = plan.prompts(f"warm/{number}", plan.warmup)
    first = await run_closed(stack.target, warm, concurrency=plan.warmup, ask=plan.ask, stop=stop)
    if not first.interrupted and not (s := first.summary()).ok:
        console.print(f"  {name}: no warm-up request succeeded: {s.errors}", style="red", highlight=False, markup=False)
        return
    for level in levels:
        prompts = plan.prompts(f"{number}/{level.users}", level.requests)
        with progress(console, f"{name}, {level.users} at a time", len(prompts)) as on_trace:
            report = await run_closed(
                stack.target, prompts, concurrency=level.users, ask=plan.ask, stop=stop, on_trace=on_trace
            )
        if report.interrupted:
            return
        s = report.summary()
        journal.add(_key(number, name, level), {"start_s": stack.start_s, "about": stack.about, "summary": asdict(s)})
        ttft = f", TTFT p50 {s.ttft_ms.p50:.0f} ms" if s.ttft_ms else ""
        wrong = "" if s.ok == s.offered else f"; {s.offered - s.ok} of {s.offered} NOT ok: {s.errors}"
        said = (
            f"  {name}, {level.users} at a time: {s.output_per_s:.1f} output tok/s{ttft} in {s.duration_s:.0f} s{wrong}"
        )
        console.print(said, style="red" if wrong else None, highlight=False, markup=False)
        if not s.ok:
            return


def _whole(run: dict[str, Any] | None) -> bool:
    """Whether it was measured and no request failed: otherwise its rate would flatter, and a rerun tries again."""
    return run is not None and run["summary"]["ok"] == run["summary"]["offered"]


def summary(plan: Plan, journal: Journal) -> dict[str, Any]:
    """Every run's figures, and for each level ours against theirs: the median of the rounds' ratios and their range."""
    ours = [c for c in plan.contenders if c.startswith("sluice")]
    theirs = [c for c in plan.contenders if c not in ours] or ours[1:]
    levels = []
    for level in plan.levels:
        runs = {c: _figures(plan, journal, level, c) for c in plan.contenders}
        ratios = [_ratio(runs, a, b, name) for a in ours for b in theirs if a != b for name, _, _ in FIGURES]
        levels.append({"users": level.users, "runs": runs, "ratios": [r for r in ratios if r]})
    return {"contenders": plan.contenders, "rounds": plan.rounds, "levels": levels, "settings": journal.settings}


def _figures(plan: Plan, journal: Journal, level: Level, name: str) -> list[dict[str, float] | None]:
    """By round; None for a round that is missing or in which a request failed."""
    found: list[dict[str, float] | None] = []
    for number in range(plan.rounds):
        run = journal.runs.get(_key(number, name, level))
        if run is None or not _whole(run):
            found.append(None)
            continue
        values = {"start_s": run["start_s"]} | run["summary"]
        picked = {said: (values[outer] or {}).get(inner) if inner else values[outer] for said, outer, inner in FIGURES}
        found.append({said: value for said, value in picked.items() if value is not None})
    return found


def _ratio(runs: dict[str, list[dict[str, float] | None]], a: str, b: str, figure: str) -> dict[str, Any] | None:
    q = quotients((x.get(figure), y.get(figure)) for x, y in zip(runs[a], runs[b], strict=True) if x and y)
    if q is None:
        return None
    told = {"ratio": q.median, "low": q.low, "high": q.high, "rounds": len(q.each)}
    return {"a": a, "b": b, "figure": figure, **told}


def markdown(found: dict[str, Any]) -> str:
    """Two tables: each contender's medians, and the ratios with their range over the rounds."""
    names = [said for said, _, _ in FIGURES]
    lines = ["| users | server | " + " | ".join(names) + " | rounds |", "|---" * (len(names) + 3) + "|"]
    for level in found["levels"]:
        for contender, runs in level["runs"].items():
            there = [r for r in runs if r]
            cells = [_median([r[n] for r in there if n in r]) for n in names]
            lines.append(f"| {level['users']} | {contender} | {' | '.join(cells)} | {len(there)} |")
    lines += [
        "",
        "| users | | output tok/s | total tok/s | TTFT p50 | TPOT p50 | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for level in found["levels"]:
        by_pair: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for r in level["ratios"]:
            by_pair.setdefault((r["a"], r["b"]), {})[r["figure"]] = r
        for (a, b), ratios in by_pair.items():
            cells = [_said(ratios.get(n)) for n in names[:4]]
            count = max(r["rounds"] for r in ratios.values())
            lines.append(f"| {level['users']} | {a} / {b} | {' | '.join(cells)} | {count} |")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.1f}" if values else "–"


def _said(r: dict[str, Any] | None) -> str:
    return "–" if r is None else f"{r['ratio']:.2f} ({r['low']:.2f} … {r['high']:.2f})"


def _key(number: int, name: str, level: Level) -> str:
    return f"{number}/{name}/{level.users}x{level.requests}"
