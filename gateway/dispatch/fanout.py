"""From the entries of the reply stream to the requests they are for: first tokens at once, the rest in small lots.

An engine's step brings a token for every stream at the same moment. Handed out in one go, two hundred of them would
keep a new request, or another's first token, waiting until the last is sent: that is some 7 ms.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.protocol.messages import Delta

__all__ = ["Fanout"]

_LOT = 8
"""Deltas between two looks at the sockets, a third of a millisecond of sending: a new request takes some five turns of
the loop from its first byte to the queue, and each may have a lot before it."""
_MOST_WAITING = 4096
"""With more than these the reader reads no further: what streams may have waiting is bounded elsewhere, by stream."""


class Fanout:
    """`hand_out` gets the deltas of each request in their order; a first token may overtake only other requests'."""

    def __init__(self, hand_out: Callable[[list[Delta]], None]) -> None:
        self._hand_out = hand_out
        self._waiting: deque[Delta] = deque()
        self._turn: asyncio.Handle | None = None

    def give(self, deltas: list[Delta]) -> None:
        """Take one entry of the stream."""
        if self._turn is None and len(deltas) <= _LOT:
            self._hand_out(deltas)
            return
        firsts = [d for d in deltas if _is_first(d)]
        if firsts:
            self._hand_out(firsts)
            deltas = [d for d in deltas if not _is_first(d)]
        self._waiting.extend(deltas)
        if self._turn is None and deltas:
            self._take_turn()

    @property
    def full(self) -> bool:
        """Too much waits: give nothing more before some of it is handed out."""
        return len(self._waiting) > _MOST_WAITING

    def _take_turn(self) -> None:
        waiting = self._waiting
        try:
            self._hand_out([waiting.popleft() for _ in range(min(_LOT, len(waiting)))])
        finally:
            # Called after what this lot woke has run, and after a look at the sockets.
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn) if waiting else None


def _is_first(delta: Delta) -> bool:
    """Nothing of its request can be before it, and it is not the end of anything."""
    return delta.start == 0 and bool(delta.tokens) and delta.finish is None and not delta.code
