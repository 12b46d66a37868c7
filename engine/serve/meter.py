"""What an engine says of itself once a second: its speed over the last seconds and what it holds."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Meter"]

_WINDOW_S = 5.0
_STEPS = 64


class Meter:
    """Rates over a sliding window. Written by the loop's thread, read by the puller's: each read is of one value."""

    def __init__(self) -> None:
        self.steps = 0
        self._durations: deque[float] = deque(maxlen=_STEPS)
        self._rows: deque[tuple[float, int, int]] = deque()

    def step(self, now: float, seconds: float, prefill: int, output: int) -> None:
        """One executed step: its duration and how many prompt and output tokens it made."""
        self.steps += 1
        self._durations.append(seconds)
        self._rows.append((now, prefill, output))
        while self._rows and now - self._rows[0][0] > _WINDOW_S:
            self._rows.popleft()

    def rates(self, now: float) -> tuple[float, float]:
        """(prompt, output) tokens a second over the window."""
        rows = [r for r in self._rows.copy() if now - r[0] <= _WINDOW_S]
        if not rows:
            return 0.0, 0.0
        span = max(now - rows[0][0], 0.5)
        return sum(r[1] for r in rows) / span, sum(r[2] for r in rows) / span

    @property
    def step_s(self) -> float:
        """Median duration of recent steps, seconds; 0 before the first."""
        recent = tuple(self._durations.copy())
        return median(recent) if recent else 0.0
