"""Admissions on one connection of their own: each goes at once, beside those whose answers are still on the way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine.protocol.functions import Admission, AsyncFunctions, Verdict
from gateway.dispatch.wire import Wire, pack

__all__ = ["Admitter"]

log = logging.getLogger(__name__)

_AT_A_TIME = 16
"""An admission takes Redis about 0.2 ms, and those of one read are answered together: the first waits for the last."""
_TRIES = 2
"""As the client library does it: again once, which mends a connection that a restarted server has dropped."""


@dataclass(slots=True)
class _Asked:
    command: bytes
    future: asyncio.Future[Verdict]
    tries: int = 0


class Admitter:
    """Calls `admit` for many requests: no client that leaves can interrupt one, and a burst takes no connections from
    others."""

    def __init__(self, redis: Redis, functions: AsyncFunctions) -> None:
        self._redis, self._functions = redis, functions
        self._waiting: deque[_Asked] = deque()
        self._wire: Wire | None = None
        self._lacks_library = False
        self._mending: asyncio.Task[None] | None = None

    def admit(self, admission: Admission, work: bytes) -> asyncio.Future[Verdict]:
        """The verdict, in time, or a `RedisError` or `OSError`. Decided whether or not anybody still waits for it."""
        command = pack(*self._functions.admit_command(admission, work))
        asked = _Asked(command, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._go_on()
        return asked.future

    def close(self) -> None:
        if self._mending is not None:
            self._mending.cancel()
        if self._wire is not None:
            self._wire.close()

    def _go_on(self) -> None:
        """Send what may be sent now."""
        if self._mending is not None:
            return
        wire = self._wire
        if wire is None or wire.closed or self._lacks_library:
            if self._waiting:
                self._mending = asyncio.create_task(self._mend())
            return
        while self._waiting and wire.waiting < _AT_A_TIME:
            asked = self._waiting.popleft()
            asked.tries += 1
            wire.ask(asked.command, lambda found, asked=asked: self._answered(asked, found))  # type: ignore[misc]

    async def _mend(self) -> None:
        """Get what is missing; without it nobody can be admitted."""
        try:
            if self._lacks_library:
                await self._functions.load()
                self._lacks_library = False
            if self._wire is None or self._wire.closed:
                self._wire = await Wire.open(self._redis)
        except (RedisError, OSError) as error:
            self._fail(error)
        except BaseException as error:
            self._fail(RedisError(f"admission was interrupted: {error!r}"))
            raise
        finally:
            self._mending = None
        self._go_on()

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for asked in waiting:
            _settle(asked.future, error)

    def _answered(self, asked: _Asked, found: Any) -> None:
        lost = isinstance(found, RedisConnectionError | RedisTimeoutError)
        lacking = isinstance(found, ResponseError) and self._functions.missing(found)
        if (lost or lacking) and asked.tries < _TRIES:
            # `admit` answers a request that it has admitted before as it did then: it may be asked again.
            self._lacks_library = self._lacks_library or lacking
            self._waiting.append(asked)
        else:
            _settle(asked.future, self._read(found))
        if self._waiting:
            self._go_on()

    def _read(self, found: Any) -> Verdict | Exception:
        if isinstance(found, ResponseError):
            return self._functions.refined(self._functions.keys, found)
        return found if isinstance(found, Exception) else self._functions.verdict(found)


def _settle(future: asyncio.Future[Verdict], found: Verdict | Exception) -> None:
    if future.done():
        return
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)
