"""Output lengths: what a tier's sequences made lately, and the peak of memory that the running ones will reach."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

__all__ = ["Outlook", "OutputForecast"]

_WINDOW = 128  # lengths remembered per tier
_ENOUGH = 8  # samples before they are trusted
_QUANTILE = 0.6  # of the lengths that exceed what was already made: a little above the median


class OutputForecast:
    """Remaining output of a sequence, from the lengths its tier's last sequences reached."""

    def __init__(self, default: int) -> None:
        self._default = default
        self._recent: dict[int, deque[int]] = {}
        self._sorted: dict[int, list[int]] = {}

    def observe(self, tier: int, length: int) -> None:
        recent, ordered = self._recent.setdefault(tier, deque()), self._sorted.setdefault(tier, [])
        recent.append(length)
        insort(ordered, length)
        if len(recent) > _WINDOW:
            ordered.remove(recent.popleft())

    def remaining(self, tier: int, generated: int, limit: int) -> int:
        """Tokens still to come, given that `generated` were made and no more than `limit` are allowed in all."""
        ordered = self._sorted.get(tier, ())
        if len(ordered) < _ENOUGH:
            expected = max(self._default, generated + self._default // 4)
        else:
            above = bisect_right(ordered, generated)
            tail = len(ordered) - above
            expected = ordered[above + int(tail * _QUANTILE)] if tail else generated + max(16, generated // 4)
        return max(0, min(expected, limit) - generated)


class Outlook:
    """Peak of memory if sequences end as forecast: the longest stay, and each grows until it ends.

    Sorted by remaining output r (longest first), the memory just before the i-th ends is
    shared + Σ_{j≤i} held_j + i·r_i; the largest of these is the peak. (After the "past-future" scheduler, ASPLOS 2025.)
    """

    def __init__(self, members: Iterable[tuple[int, int]], shared: int, capacity: int) -> None:
        """`members` are (remaining, held) tokens; `shared` tokens are held by several; `capacity` is the whole pool."""
        self._members = sorted(((-remaining, held) for remaining, held in members))
        self._shared, self._capacity = shared, capacity
        self._bound = shared + sum(held - negative for negative, held in self._members)
        """No peak is higher: that of all when the last token of each is made and none has ended."""

    def fits(self, remaining: int, held: int) -> bool:
        """Does the peak stay within the pool with one more?"""
        if self._bound + held + remaining <= self._capacity:
            return True
        members = self._members.copy()
        insort(members, (-remaining, held))
        total = self._shared
        for count, (negative, size) in enumerate(members, 1):
            total += size
            if total - count * negative > self._capacity:
                return False
        return True

    def add(self, remaining: int, held: int) -> None:
        insort(self._members, (-remaining, held))
        self._bound += held + remaining
