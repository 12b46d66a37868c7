"""Stop strings over a stream of text pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["StopScanner"]


class StopScanner:
    """Finds the first stop string to be completed, wherever the text was cut into pieces.

    Text is held back while it may still become a stop string, so no part of one is ever emitted. The match that is
    complete first wins (of two that end together, the longer one): this is what a reader of single characters would
    see, so the result doesn't depend on token boundaries.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise ValueError("an empty stop string matches everywhere")
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what may be emitted now and the stop string that ended it, if one did."""
        if self._hit is not None or not self._stops:
            return ("" if self._hit is not None else text), self._hit
        text = self._held + text
        found = self._first(text)
        if found is not None:
            start, self._hit = found
            self._held = ""
            return text[:start], self._hit
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def state(self) -> dict[str, Any]:
        return {"held": self._held, "hit": self._hit}

    def restore(self, state: dict[str, Any]) -> None:
        self._held = state["held"]
        self._hit = state["hit"]

    def _first(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the match with the earliest end."""
        ends = ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0)
        best = min(ends, default=None)
        return None if best is None else (best[1], best[2])

    def _may_begin(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for size in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            suffix = text[-size:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0
