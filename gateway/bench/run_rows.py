"""Running a row: pairs of fresh stacks in turn, each result kept at once, and the table at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console

from gateway.bench.client import Ask, Unreachable
from gateway.bench.journal import Journal
from gateway.bench.quotients import quotients
from gateway.bench.rows import Failed, Figures, Row, Run, Stopped
from gateway.bench.stacks import Place, sluice

__all__ = ["judged", "markdown", "run_row"]


async def run_row(
    name: str,
    row: Row,
    place: Place,
    journal: Journal,
    console: Console,
    stop: asyncio.Event,
    pairs: int,
    more: Sequence[str] = (),
) -> None:
    """Measure what the journal has not. `more`: options of `sluice up` for every stack; engine options are joined."""

    def say(pair: int, text: str, style: str | None = None) -> None:
        console.print(f"  {name} {pair + 1}/{pairs}{text}", style=style, highlight=False, markup=False)

    for pair in range(pairs):
        turn = 1 if pair % 2 == 0 else -1
        for options, variants in row.stacks[::turn]:
            missing = [v for v in variants[::turn] if _key(name, pair, v) not in journal.runs]
            if not missing or stop.is_set():
                continue
            try:
                say(pair, f": starting a stack for {', '.join(missing)}", "dim")
                async with sluice(place, *_joined((*more, *options)), stop=stop) as stack:
                    for variant in missing:
                        say(pair, f", {variant}: measuring", "dim")
                        run = Run(stack, variant, pair, journal.settings["seed"], stop, journal.settings["scale"])
                        await _warm(run)
                        found = await row.measure(run)
                        journal.add(_key(name, pair, variant), found)
                        say(pair, f", {variant}: {_brief(found)}")
            except Stopped:
                return
            except (Failed, Unreachable) as error:
                if not stop.is_set():
                    say(pair, f": {error}", "red")


async def _warm(run: Run) -> None:
    """Code paths and caches of every shape that follows, with prompts that nothing else uses."""
    await run.closed(run.prompts("words:64", 8, f"warm/{run.variant}"), 8, Ask(8))


def _joined(options: Sequence[str]) -> list[str]:
    """One --engine-options of all of them."""
    head = "--engine-options="
    words = [o.removeprefix(head) for o in options if o.startswith(head)]
    return [*(o for o in options if not o.startswith(head)), head + " ".join(filter(None, words))]


def judged(name: str, row: Row, journal: Journal, pairs: int) -> dict[str, Any]:
    """Every pair's figures, the quotients (median, range, each), and what only all pairs together tell."""
    variants = [v for _, names in row.stacks for v in names]
    whole = [n for n in range(pairs) if all(_key(name, n, v) in journal.runs for v in variants)]
    found = {v: [journal.runs[_key(name, n, v)] for n in whole] for v in variants}
    told = []
    for wanted in row.quotients:
        both = zip(found[wanted.over], found[wanted.under], strict=True)
        if q := quotients((a[wanted.figure], b[wanted.figure]) for a, b in both):
            figures = {"ratio": q.median, "low": q.low, "high": q.high, "each": list(q.each)}
            told.append({"name": wanted.name, "wanted": wanted.wanted, **figures})
    pooled = row.pooled(found) if whole else {}
    return {
        "row": name,
        "about": row.about,
        "pairs": len(whole),
        "found": found,
        "quotients": told,
        "pooled": pooled,
    }


def markdown(row: Row, found: dict[str, Any]) -> str:
    """For docs and eyes: medians by variant, then the quotients."""
    lines = [f"{found['about']} ({found['pairs']} pairs)", ""]
    lines += ["| | " + " | ".join(row.shown) + " |", "|---" * (len(row.shown) + 1) + "|"]
    for variant, runs in found["found"].items():
        cells = []
        for figure in row.shown:
            values = [r[figure] for r in runs if r.get(figure) is not None]
            cells.append(
                f"{_number(median(values))} ({_number(min(values))} … {_number(max(values))})" if values else "–"
            )
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    lines.append("")
    for q in found["quotients"]:
        wanted = f"; wanted {q['wanted']}" if q["wanted"] else ""
        lines.append(f"- {q['name']}: **{q['ratio']:.2f}** ({q['low']:.2f} … {q['high']:.2f}{wanted})")
    lines += [f"- {name}: {said}" for name, said in found["pooled"].items()]
    if row.wanted:
        lines.append(f"- wanted: {row.wanted}")
    return "\n".join(lines)


def _key(name: str, pair: int, variant: str) -> str:
    return f"{name}/{pair}/{variant}"


def _brief(found: Figures) -> str:
    return ", ".join(f"{k} {_number(v)}" for k, v in found.items() if isinstance(v, int | float))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
