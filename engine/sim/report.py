"""What a run came to: latency percentiles, attainment, goodput and fairness, as a table, JSON or an SVG plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.sim.workload import TIERS
from engine.sim.world import Life, World

__all__ = ["jain", "percentile", "plot", "summary", "table"]


def percentile(values: Iterable[float], q: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def jain(shares: Sequence[float]) -> float | None:
    """1 when all shares are equal, 1/n when one has everything."""
    squares = sum(s * s for s in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


def _row(name: str, lives: list[Life], span_s: float) -> dict[str, Any]:
    started = [life for life in lives if life.first_s >= 0.0]
    met = sum(life.met for life in lives)
    row: dict[str, Any] = {"who": name, "offered": len(lives), "done": sum(life.done for life in lives)}
    row |= {"attained": met / len(lives), "goodput_per_s": met / span_s}
    for q in (0.5, 0.95, 0.99):
        row[f"ttft_p{q * 100:.0f}_s"] = percentile((life.ttft_s for life in started), q)
    for q in (0.5, 0.95):
        row[f"tpot_p{q * 100:.0f}_s"] = percentile((life.tpot_s for life in started if life.tokens > 1), q)
    row["stall_p99_s"] = percentile((life.stall_s for life in started), 0.99)
    row["tokens_per_s"] = sum(life.tokens for life in lives) / span_s
    return row


def summary(world: World) -> dict[str, Any]:
    """Everything measured, JSON-able. Refused and unfinished requests count as offered and not met."""
    lives = list(world.lives.values())
    start = min((life.arrival.at_s for life in lives), default=0.0)
    span = max(1e-9, max((life.last_s for life in lives), default=0.0) - start)
    groups: dict[tuple[int, str], list[Life]] = {}
    for life in lives:
        groups.setdefault((life.arrival.tier, ""), []).append(life)
        groups.setdefault((life.arrival.tier, life.arrival.tenant), []).append(life)
    rows = [_row(f"{TIERS[t].name} {n}".strip(), groups[t, n], span) for t, n in sorted(groups)]
    shares: dict[str, float] = {}
    for life in lives:
        served = (life.arrival.prompt if life.first_s >= 0 else 0) + 2 * life.tokens
        shares[life.arrival.tenant] = shares.get(life.arrival.tenant, 0.0) + served / life.arrival.weight
    whole: dict[str, Any] = {"policy": world.policy, "engines": world.engines, "makespan_s": span}
    whole |= {"requests": len(lives), "met_per_s": sum(life.met for life in lives) / span}
    whole |= {"jain": jain(list(shares.values())), "steps": sum(engine.steps for engine in world.fleet)}
    whole |= {"recomputed_tokens": sum(engine.recomputed for engine in world.fleet)}
    return whole | {"swaps": sum(engine.swaps for engine in world.fleet), "rows": rows}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return "–" if value is None else str(value)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of equal dicts."""
    if not rows:
        return ""
    head = list(rows[0])
    cells = [head, *[[_cell(row[name]) for name in head] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def plot(title: str, series: dict[str, list[tuple[float, float]]], x: str, y: str) -> str:
    """Line plot as SVG, without any library."""
    points = [p for line in series.values() for p in line]
    high_x, high_y = max(p[0] for p in points) or 1.0, max(p[1] for p in points) or 1.0
    colours = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df")
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 400" font-family="sans-serif" font-size="12">']
    parts.append(f'<text x="60" y="20" font-size="14">{title}</text>')
    parts.append('<path d="M60 30V350H620" fill="none" stroke="#888"/>')
    parts.append(f'<text x="560" y="385">{x}</text><text x="4" y="40">{y}</text>')
    for part in (0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{60 + 540 * part:.0f}" y="367" text-anchor="middle">{high_x * part:.3g}</text>')
        parts.append(f'<text x="56" y="{354 - 310 * part:.0f}" text-anchor="end">{high_y * part:.3g}</text>')
    for i, (name, line) in enumerate(series.items()):
        path = " ".join(f"{60 + 540 * px / high_x:.1f},{350 - 310 * py / high_y:.1f}" for px, py in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[i % 5]}" stroke-width="2"/>')
        parts.append(f'<text x="70" y="{48 + 16 * i}" fill="{colours[i % 5]}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])
