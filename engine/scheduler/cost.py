"""The step-cost model: how long a step takes, learnt from the steps themselves, and its inverse.

t = c + γ·prefill + b·rows + a·context    (seconds; tokens, decode rows, tokens of context that the rows attend to)

Fitted by exponentially forgetting least squares with non-negative coefficients. A step is weighted by 1/t², so that the
error is relative: a cheap decode step counts as much as a long prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load", "StepCost"]

_FORGET = 0.998  # memory of about 500 steps
_SWEEPS = 4  # coordinate descent from the last solution; the normal equations barely move in one step
_RIDGE = 1e-3  # weight of the prior, in steps


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes: prefill tokens, decode rows, and the context (tokens) they all attend to."""

    prefill: int
    rows: int
    context: int


class StepCost:
    """Coefficients (c, γ, b, a) in seconds; the prior is replaced as steps are observed."""

    def __init__(self, c: float = 0.015, prefill: float = 6e-4, row: float = 9e-4, context: float = 2e-7) -> None:
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

    def prefill_seconds(self, tokens: int) -> float:
        """Marginal time to compute `tokens` prompt tokens in steps that happen anyway."""
        return self._w[1] * tokens + self._w[3] * tokens * tokens / 2

    def largest_prefill(self, budget_s: float, rows: int, context: int) -> int:
        """The inverse: most prefill tokens that keep the step within `budget_s` beside these decodes (may be < 0)."""
        c, prefill, row, a = self._w
        spare = budget_s - c - row * rows - a * context
        return int(spare / max(prefill, 1e-9)) if spare > 0 else -1

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
