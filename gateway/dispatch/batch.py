"""Admissions that wait at the same time share a round trip: the first goes at once, the rest go together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from engine.protocol.functions import Admission, AsyncFunctions, Verdict

__all__ = ["Admitter"]

log = logging.getLogger(__name__)

_BATCH = 16
"""An admission takes Redis about 0.2 ms and the first of a batch waits for the last."""
_WRITERS = 2
"""Batches on their way at a time: while one's answers are read, Redis works on the next."""

_Waiting = tuple[Admission, bytes, "asyncio.Future[Verdict]"]


class Admitter:
    """Calls `admit` for many requests in pipelines, in tasks of its own: no client that leaves can interrupt one.

    It costs the event loop a third of a call for each, and a burst takes no connections from others.
    """

    def __init__(self, redis: Redis, functions: AsyncFunctions) -> None:
        self._redis, self._functions = redis, functions
        self._waiting: deque[_Waiting] = deque()
        self._writers: set[asyncio.Task[None]] = set()

    def admit(self, admission: Admission, work: bytes) -> asyncio.Future[Verdict]:
        """The verdict, in time, or a `RedisError` or `OSError`. Decided whether or not anybody still waits for it."""
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((admission, work, future))
        if len(self._writers) < _WRITERS:
            writer = asyncio.create_task(self._write())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)
        return future

    async def _write(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            try:
                answers = await self._ask(batch)
            except (RedisError, OSError) as error:
                answers = [error] * len(batch)
            except BaseException as error:
                _settle(batch, [RedisError(f"admission was interrupted: {error!r}")] * len(batch))
                raise
            _settle(batch, answers)

    async def _ask(self, batch: list[_Waiting]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for admission, work, _ in batch:
            self._functions.queue_admit(pipe, admission, work)
        answers = await pipe.execute(raise_on_error=False)
        return [
            await self._again(admission, work, raw) for (admission, work, _), raw in zip(batch, answers, strict=True)
        ]

    async def _again(self, admission: Admission, work: bytes, raw: Any) -> Any:
        """After a wipe or a fail-over the server lacks the function: such a call took no effect."""
        try:
            if isinstance(raw, ResponseError):
                if self._functions.missing(raw):
                    return await self._functions.admit(admission, work)
                return self._functions.refined(self._functions.keys, raw)
            return raw if isinstance(raw, Exception) else self._functions.verdict(raw)
        except (RedisError, OSError) as error:
            return error


def _settle(batch: list[_Waiting], answers: list[Any]) -> None:
    for (_, _, future), answer in zip(batch, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
