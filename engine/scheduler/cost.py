"""The step-cost model: how long a step takes, learnt from the steps themselves, and its inverse.

t = c + γ·prefill + b·rows + a·context    (seconds; prefill tokens, decode rows, attended token pairs)

Fitted by exponentially forgetting least squares with non-negative coefficients. A step is weighted by 1/t², so that the
error is relative: a cheap decode step counts as much as a long prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from engine.scheduler.step import Slice

__all__ = ["Load", "StepCost"]

_FORGET = 0.998  # memory of about 500 steps
_SWEEPS = 4  # coordinate descent from the last solution; the normal equations barely move in one step
_RIDGE = 1e-3  # weight of the prior, in steps


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes: prefill tokens, decode rows, and the (token, attended token) pairs of them all."""

    prefill: int
    rows: int
    context: float

    @staticmethod
    def of(slices: Iterable[Slice]) -> Load:
        prefill, rows, context = 0, 0, 0.0
        for piece in slices:
            if piece.length == 1:
                rows += 1
                context += piece.start
            else:
                prefill += piece.length
                context += piece.length * (piece.start + piece.length / 2)
        return Load(prefill, rows, context)


class StepCost:
    """Coefficients (c, γ, b, a) in seconds; the prior is replaced as steps are observed."""

    def __init__(self, c: float = 0.015, prefill: float = 6e-4, row: float = 6.5e-4, context: float = 8e-7) -> None:
        self._w = [c, prefill, row, context]
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._target = [0.0] * 4
        self.observed = 0
        for i, w in enumerate(self._w):
            scale = (1.0, 1e4, 1e3, 1e8)[i] * _RIDGE / c**2
            self._moments[i][i] = scale
            self._target[i] = scale * w

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        c, prefill, row, context = self._w
        return c, prefill, row, context

    def seconds(self, load: Load) -> float:
        c, prefill, row, context = self._w
        return c + prefill * load.prefill + row * load.rows + context * load.context

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        """Marginal time to compute `tokens` prompt tokens from position `start` on, in a step that happens anyway."""
        return tokens * (self._w[1] + self._w[3] * (start + tokens / 2))

    def largest_prefill(self, spare_s: float, start: int) -> int:
        """The inverse: the most prompt tokens from `start` on that take at most `spare_s` seconds.

        Solves a/2·p² + (γ + a·start)·p = spare for p, in the form that stays exact when a is 0.
        """
        if spare_s <= 0.0:
            return 0
        slope = max(self._w[1] + self._w[3] * start, 1e-9)
        return int(2.0 * spare_s / (slope + sqrt(slope * slope + 2.0 * self._w[3] * spare_s)))

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from one measured step."""
        if seconds <= 0.0:
            return
        x = (1.0, float(load.prefill), float(load.rows), float(load.context))
        weight = 1.0 / (seconds * seconds)
        for i in range(4):
            row, xi = self._moments[i], x[i] * weight
            for j in range(4):
                row[j] = _FORGET * row[j] + xi * x[j]
            self._target[i] = _FORGET * self._target[i] + xi * seconds
        self.observed += 1
        self._solve(40 if self.observed < 64 else _SWEEPS)

    def _solve(self, sweeps: int) -> None:
        w = self._w
        for _ in range(sweeps):
            for i in range(4):
                row = self._moments[i]
                if row[i] > 0.0:
                    rest = sum(row[j] * w[j] for j in range(4) if j != i)
                    w[i] = max(0.0, (self._target[i] - rest) / row[i])
