"""What one admitted request receives: deltas in order, each once, through a bounded buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any

from engine.protocol.messages import Delta
from gateway.errors import ApiError

__all__ = ["MAX_PENDING", "Reply"]

MAX_PENDING = 2048
"""Deltas a stream may have waiting for its client (about 200 KB of text) before that stream alone is ended."""


class Reply:
    """The receiving end of one request. `feed` and `fail` are called by the reader, `get` by the one consumer."""

    __slots__ = (
        "_failure",
        "_next",
        "_open",
        "_patience_s",
        "_pending",
        "_timer",
        "_waiter",
        "_wake_at",
        "cached_tokens",
        "discards",
        "ended",
        "epoch",
        "limit",
        "n",
        "on_overflow",
        "prefill_s",
        "queued_s",
        "request",
        "sink",
    )

    def __init__(self, request: str, choices: int, n: int = 1, limit: int = MAX_PENDING) -> None:
        self.request = request
        self.n = n
        """Choices per prompt: a prompt's cached tokens are counted once."""
        self.limit = limit
        self.epoch = 0
        self.discards = False
        """The client is gone; tokens are only counted."""
        self.ended = False
        """Nothing more goes to the client than what waits: all choices finished, or the request failed."""
        self.cached_tokens = 0
        self.queued_s: float | None = None
        self.prefill_s: float | None = None
        self.on_overflow: Callable[[], Any] | None = None
        self.sink: Callable[[list[Delta]], bool] | None = None
        """Gets what comes while the consumer waits, and may take it in its place: a task that is woken for each delta
        costs more than the delta. False: the consumer shall have it. The end is always the consumer's."""
        self._next = [0] * choices
        self._open = set(range(choices))
        self._pending: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._patience_s = self._wake_at = inf
        self._timer: asyncio.TimerHandle | None = None
        self._failure: ApiError | None = None

    @property
    def complete(self) -> bool:
        """All of the answer has arrived."""
        return self.ended and self._failure is None

    @property
    def waiting(self) -> int:
        """Deltas that the client has not taken yet."""
        return len(self._pending)

    def discard(self) -> None:
        """Keep nothing for the client from now on."""
        self.discards = True
        self._pending.clear()

    @property
    def received_tokens(self) -> int:
        return sum(self._next)

    def feed(self, delta: Delta) -> None:
        """Take one delta from the wire; late, repeated and foreign ones are dropped (I1).

        Also after `fail`: what was computed for a client that is gone still counts.
        """
        if delta.epoch < self.epoch:
            return
        self.epoch = delta.epoch
        if delta.finish in ("error", "abort"):
            code = delta.code or ("engine_lost" if delta.finish == "abort" else "engine_error")
            self.fail(ApiError(code, f"The engine could not finish this request: {delta.detail or delta.finish}."))
            return
        choice = delta.choice
        if choice not in self._open:
            return
        expected = self._next[choice]
        if delta.start != expected:
            # A repeat is dropped whole; a hole can't be mended, because text is a function of all ids before it.
            if delta.start > expected or delta.start + len(delta.tokens) > expected:
                self.fail(ApiError("queue_lost", "A part of the answer was lost in the queue."))
            return
        self._next[choice] = expected + len(delta.tokens)
        if delta.finish is not None:
            self._open.discard(choice)
        if not self.ended:
            self._keep(delta)

    def _keep(self, delta: Delta) -> None:
        if delta.cached_tokens and delta.start == 0 and delta.choice % self.n == 0:
            self.cached_tokens += delta.cached_tokens
        if delta.queued_s is not None and self.queued_s is None:
            self.queued_s, self.prefill_s = delta.queued_s, delta.prefill_s
        if not self.discards:
            self._pending.append(delta)
        if delta.last or not self._open:
            self._end()
        if len(self._pending) > self.limit:
            self._overflow()
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End with an error, after whatever already arrived. The first failure stands."""
        if not self.ended:
            self._end()
            self._failure = error
            self._wake()

    def _end(self) -> None:
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overflow(self) -> None:
        self._pending.clear()
        self._end()
        self._failure = ApiError("slow_client", "The client reads too slowly.")
        if self.on_overflow is not None:
            self.on_overflow()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            sunk = self.sink is not None and self._pending and not self.ended and self.sink(self._pending)
        except Exception as error:  # who feeds has other requests to feed
            waiter.set_exception(error)
            return
        if sunk:
            self._pending.clear()
            self._wake_at = waiter.get_loop().time() + self._patience_s
        else:
            waiter.set_result(None)

    def _set_alarm(self, loop: asyncio.AbstractEventLoop, timeout_s: float | None) -> None:
        """One timer serves all waits of a stream: when it goes off before `_wake_at` it is set again. A timer for each
        delta would add a tenth to what a delta costs."""
        self._patience_s = timeout_s if timeout_s is not None else inf
        self._wake_at = loop.time() + self._patience_s
        if timeout_s is None:
            return
        if self._timer is not None and self._timer.when() > self._wake_at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_at(self._wake_at, self._alarm, loop)

    def _alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._wake_at == inf:
            return
        if loop.time() >= self._wake_at - 0.001:  # the loop counts milliseconds
            self._wake()
        else:
            self._timer = loop.call_at(self._wake_at, self._alarm, loop)

    async def get(self, timeout_s: float | None = None) -> list[Delta]:
        """All deltas that wait, at least one; empty after `timeout_s` or at the end. Raises the failure in its turn."""
        if not self._pending and not self.ended:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            self._set_alarm(loop, timeout_s)
            try:
                await waiter
            finally:
                self._waiter = None
        if self._pending:
            pending, self._pending = self._pending, []
            return pending
        if self._failure is not None:
            raise self._failure
        return []
