"""Batched, ordered writing of outcomes, refusals and events to their streams. No request waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.events import Event
from engine.protocol.keys import Keys
from engine.protocol.messages import Outcome, Refusal, encode

__all__ = ["Recorder"]

log = logging.getLogger(__name__)

_EVERY_S = 0.05
_BATCH = 512
_KEEP_REFUSALS_MS = 86_400_000
_KEEP_EVENTS = 200_000
_MAX_WAITING = 100_000
"""While Redis is away: outcomes beyond this many are dropped, oldest first, and the drop is logged."""


class Recorder:
    """Collects in memory, writes every 50 ms in one pipeline, keeps what could not be written."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._outcomes: deque[Outcome] = deque()
        self._refusals: deque[Refusal] = deque()
        self._events: deque[Event] = deque()
        self.on_outcome: Callable[[Outcome], None] | None = None
        self.on_refusal: Callable[[Refusal], None] | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="recorder")

    async def stop(self) -> None:
        """Write what is left, within a second."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(1):
                while self._waiting:
                    await self._write()
        except (RedisError, OSError, TimeoutError) as error:
            log.error("%d records could not be written at shutdown: %s", self._waiting, error)

    def outcome(self, outcome: Outcome) -> None:
        self._append(self._outcomes, outcome)
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def refusal(self, refusal: Refusal) -> None:
        self._append(self._refusals, refusal)
        if self.on_refusal is not None:
            self.on_refusal(refusal)

    def event(self, event: Event) -> None:
        self._append(self._events, event)

    def _append(self, queue: deque, item: object) -> None:
        if len(queue) >= _MAX_WAITING:
            queue.popleft()
            log.error("record dropped: Redis has been away for too long")
        queue.append(item)
        self._wake.set()

    @property
    def _waiting(self) -> int:
        return len(self._outcomes) + len(self._refusals) + len(self._events)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_EVERY_S)
            self._wake.clear()
            try:
                while self._waiting:
                    await self._write()
            except (RedisError, OSError) as error:
                log.warning("records wait for Redis: %s", error)
                self._wake.set()
                await asyncio.sleep(1)

    async def _write(self) -> None:
        """One pipeline; what was written leaves the queues only when the server has answered."""
        outcomes = [self._outcomes[i] for i in range(min(_BATCH, len(self._outcomes)))]
        refusals = [self._refusals[i] for i in range(min(_BATCH, len(self._refusals)))]
        events = [self._events[i] for i in range(min(_BATCH, len(self._events)))]
        pipe = self._redis.pipeline(transaction=True)
        for outcome in outcomes:
            pipe.xadd(self._keys.outcomes, {"o": encode(outcome)})
        oldest = f"{int(time.time() * 1000) - _KEEP_REFUSALS_MS}-0"
        for refusal in refusals:
            pipe.xadd(self._keys.refusals, {"r": encode(refusal)}, minid=oldest, approximate=True)
        if events:
            pipe.xadd(self._keys.events, {"e": encode(events)}, maxlen=_KEEP_EVENTS, approximate=True)
        await pipe.execute()
        for queue, count in ((self._outcomes, outcomes), (self._refusals, refusals), (self._events, events)):
            for _ in count:
                queue.popleft()
