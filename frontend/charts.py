"""Small charts drawn as inline SVG: classes and geometry only. Colours are the style sheet's, numbers stand beside."""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

__all__ = ["meter", "sparkline", "target_bar"]

BAR_WIDTH, BAR_HEIGHT = 72, 8
SPARK_WIDTH, SPARK_HEIGHT = 90, 24
SPAN_MS = 60_000
GAP_MS = 2_500
"""Two points further apart than this are not joined: nothing was measured between them."""


def target_bar(value: float | None, target: float | None) -> SafeString:
    """A bar over 0 to twice the target with the target as a tick in the middle; longer values end at the edge."""
    if not target:
        return SafeString("")
    width = 0.0 if value is None else min(value / target, 2.0) / 2 * BAR_WIDTH
    kind = "over" if value is not None and value > target else "good"
    return format_html(
        '<svg class="bar" width="{w}" height="{h}" viewBox="0 0 {w} {h}" aria-hidden="true" focusable="false">'
        '<rect class="track" x="0" y="2" width="{w}" height="4" rx="2"/>'
        '<rect class="{kind}" x="0" y="2" width="{width}" height="4" rx="2"/>'
        '<rect class="tick" x="{middle}" y="0" width="1.5" height="{h}"/></svg>',
        w=BAR_WIDTH,
        h=BAR_HEIGHT,
        kind=kind,
        width=f"{width:.1f}",
        middle=f"{BAR_WIDTH / 2 - 0.75:.2f}",
    )


def meter(used: float, cached: float) -> SafeString:
    """A bar of two shares of one whole (each 0 to 1): in use, then held by the cache and free to take."""
    used = min(max(0.0, used), 1.0)
    cached = min(max(0.0, cached), 1.0 - used)
    return format_html(
        '<svg class="bar" width="{w}" height="{h}" viewBox="0 0 {w} {h}" aria-hidden="true" focusable="false">'
        '<rect class="track" x="0" y="1" width="{w}" height="6" rx="2"/>'
        '<rect class="{kind}" x="0" y="1" width="{used}" height="6" rx="2"/>'
        '<rect class="cached" x="{used}" y="1" width="{cached}" height="6" rx="2"/></svg>',
        w=BAR_WIDTH,
        h=BAR_HEIGHT,
        kind="tight" if used >= 0.9 else "used",
        used=f"{used * BAR_WIDTH:.1f}",
        cached=f"{cached * BAR_WIDTH:.1f}",
    )


def sparkline(points: Iterable[tuple[int, float | None]], now_ms: int, target: float | None) -> SafeString:
    """The last minute of a series, newest at the right edge, over the target as a dashed line; gaps stay gaps."""
    known = [(at, value) for at, value in points if value is not None and now_ms - at <= SPAN_MS]
    top = max([value for _, value in known] + [1.25 * target if target else 1.0])
    runs: list[list[str]] = []
    last_ms = None
    for at, value in known:
        if last_ms is None or at - last_ms > GAP_MS:
            runs.append([])
        last_ms = at
        x = SPARK_WIDTH - 2 - (now_ms - at) / SPAN_MS * (SPARK_WIDTH - 4)
        y = SPARK_HEIGHT - 2 - value / top * (SPARK_HEIGHT - 4)
        runs[-1].append(f"{x:.1f},{y:.1f}")
    # Built from numbers formatted above only, hence safe.
    lines = "".join(f'<polyline class="line" points="{" ".join(run)}"/>' for run in runs if len(run) > 1)
    if target:
        y = SPARK_HEIGHT - 2 - target / top * (SPARK_HEIGHT - 4)
        lines = f'<path class="goal" d="M0 {y:.1f}H{SPARK_WIDTH}"/>' + lines
    size = f'width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}"'
    return mark_safe(f'<svg class="spark" {size} aria-hidden="true" focusable="false">{lines}</svg>')  # noqa: S308
