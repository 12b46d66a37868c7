"""When each token of an answer is due. The prompt says it: `pace 50 20` is a first token after 50 ms, then 20 a second.

The first token is due a fixed time after the request arrived. The later ones come at the ends of steps that all streams
of one rate share, as those of a batching engine do: the first at the end of the next whole step. `hold` instead of a
rate: nothing comes after the first token.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Agenda", "Pace", "Stream"]

_PACE = re.compile(r"pace (\d{1,7}) (\d{1,5}|hold)")


@dataclass(frozen=True, slots=True)
class Pace:
    """`step_s` None: only the first token comes."""

    ttft_s: float = 0.05
    step_s: float | None = 0.05

    @classmethod
    def of(cls, prompt: str) -> Pace:
        """What the prompt asks for; without a word of it 50 ms and 20 tokens a second."""
        match = _PACE.search(prompt)
        if match is None:
            return cls()
        rate = 0 if match[2] == "hold" else int(match[2])
        return cls(int(match[1]) / 1000, 1 / rate if rate else None)

    def due(self, arrived: float, index: int) -> float:
        """When token `index` is due, for a request that came at `arrived` (both monotonic seconds)."""
        first = arrived + self.ttft_s
        if index == 0:
            return first
        return math.inf if self.step_s is None else (math.ceil(first / self.step_s) + index) * self.step_s


@dataclass(slots=True)
class Stream:
    """One answer: `total` tokens, of which `made` are said."""

    pace: Pace
    arrived: float
    total: int
    owner: Any
    made: int = 0
    gone: bool = False

    @property
    def done(self) -> bool:
        return self.made >= self.total


@dataclass(slots=True)
class Agenda:
    """Streams by the time of their next token; those of one step in the order of their arrival."""

    _heap: list[tuple[float, int, Stream]] = field(default_factory=list)
    _count: int = 0

    def add(self, stream: Stream) -> None:
        self._count += 1
        self._put(self._count, stream)

    def _put(self, number: int, stream: Stream) -> None:
        due = stream.pace.due(stream.arrived, stream.made)
        if due < math.inf:
            heapq.heappush(self._heap, (due, number, stream))

    @property
    def next(self) -> float:
        """When the next token is due; infinity when none is."""
        return self._heap[0][0] if self._heap else math.inf

    def take(self, now: float) -> list[Stream]:
        """The streams whose next token is due, each with that token counted as made. A stream that is behind by more
        than one has the others taken by the next calls: who is told of a token reads its index off the stream."""
        due: list[tuple[int, Stream]] = []
        while self._heap and self._heap[0][0] <= now:
            _, number, stream = heapq.heappop(self._heap)
            if not stream.gone:
                stream.made += 1
                due.append((number, stream))
        for number, stream in due:
            if not stream.done:
                self._put(number, stream)
        return [stream for _, stream in due]
