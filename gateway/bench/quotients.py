"""Two sides measured in pairs: the quotient is taken inside a pair, and its median and range are told over all pairs.

A pair shares its minute, so a machine that drifts does not move its quotient; the quotient of two medians it would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

__all__ = ["Quotients", "quotients"]


@dataclass(frozen=True, slots=True)
class Quotients:
    """Of one figure; at least one pair."""

    over: float
    under: float
    """Medians of each side in these pairs, for orientation; `median` is not their quotient."""
    each: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.each)

    @property
    def low(self) -> float:
        return min(self.each)

    @property
    def high(self) -> float:
        return max(self.each)


def quotients(pairs: Iterable[tuple[float | None, float | None]]) -> Quotients | None:
    """Of the pairs in which both sides have the figure and the divisor isn't zero; None without such a pair."""
    both = [(over, under) for over, under in pairs if over is not None and under]
    if not both:
        return None
    return Quotients(median(a for a, _ in both), median(b for _, b in both), tuple(a / b for a, b in both))
