"""One-shot work (embeddings, images): when a batch is worth dispatching, and which lengths belong together."""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.cost import StepCost
from engine.scheduler.sequence import Sequence

__all__ = ["ArrivalRate", "BatchWindow", "buckets"]

_RATE_WEIGHT = 0.2  # of the newest gap in the moving average
_WASTE = 0.25  # a bucket splits when padding would be more than this part of its batch


class ArrivalRate:
    """Exponentially averaged gap between arrivals of one-shot work, seconds."""

    def __init__(self) -> None:
        self.gap_s: float | None = None
        self._last: float | None = None

    def observe(self, now: float) -> None:
        if self._last is not None:
            gap = now - self._last
            self.gap_s = gap if self.gap_s is None else self.gap_s + _RATE_WEIGHT * (gap - self.gap_s)
        self._last = now


class BatchWindow:
    """Dispatch at N items, or after T seconds, or when the nearest deadline says so, or when no company is coming."""

    def __init__(self, config: SchedulerConfig, cost: StepCost, rate: ArrivalRate) -> None:
        self._config, self._cost, self._rate = config, cost, rate

    def open(self, waiting: list[Sequence], now: float) -> bool:
        """`waiting` are the one-shot sequences; call with at least one."""
        config = self._config
        count = config.window_count or config.max_rows
        age = now - min(s.submitted_s for s in waiting)
        if len(waiting) >= count or age >= config.window_s:
            return True
        batch_s = self._cost.prefill_seconds(sum(s.known for s in waiting)) + self._cost.coefficients[0]
        if min(s.request.ttft_deadline_s for s in waiting) - now <= 1.5 * batch_s:
            return True
        gap = self._rate.gap_s
        return config.adaptive_window and gap is not None and gap > config.window_s - age


def buckets(lengths: Iterable[int], longest: int, fill: int) -> list[range]:
    """Split the lengths that wait now until padding is cheap, but never below `fill` members a bucket.

    Where few wait, buckets merge again by themselves, because they are made anew from what waits.
    """
    ordered = sorted(lengths)
    found: list[range] = []

    def split(members: list[int], low: int, high: int) -> None:
        middle = (low + high) // 2
        below = sum(1 for length in members if length <= middle)
        waste = 1.0 - sum(members) / (len(members) * members[-1]) if members else 0.0
        if waste <= _WASTE or below < fill or len(members) - below < fill:
            found.append(range(low + 1, high + 1))
            return
        split(members[:below], low, middle)
        split(members[below:], middle, high)

    split(ordered, 0, max(longest, ordered[-1] if ordered else 1))
    return found
