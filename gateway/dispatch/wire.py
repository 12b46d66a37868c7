"""One connection to Redis that is spoken to directly: commands go out as they come, answers come back in their order.

The client library opens it (address, TLS, password, database). Its layers around each command, a task and four
coroutines, take longer than most commands do, and everything that is asked here has a client who waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

__all__ = ["Answer", "Wire", "pack"]

Answer = Callable[[Any], None]
"""Is called once, with the answer or with the exception that stands for it: a `RedisError`."""
_NOT_YET = object()


def pack(*words: str | bytes | int) -> bytes:
    """A command as it is sent."""
    return hiredis.pack_command(cast("Any", words))  # its stub means a tuple of one word


class Wire(asyncio.Protocol):
    """Lives as long as its connection does. Whoever asks is told in any case: an answer, or why there is none."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        """`connection` is one of the client library's, and connected: from now on its socket is ours."""
        self._parser = hiredis.Reader(
            protocolError=InvalidResponse, replyError=connection._parser.parse_error, notEnoughData=_NOT_YET
        )
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._asked: deque[tuple[float, Answer]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._end: RedisError = RedisConnectionError("the connection to Redis was closed")
        # Kept, because it would close the socket when it goes; taken away, because so would the connection.
        self._writer, connection._writer, connection._reader = connection._writer, None, None
        self._transport: asyncio.Transport = self._writer.transport
        self._transport.set_protocol(self)

    @classmethod
    async def open(cls, redis: Redis) -> Wire:
        """A connection like those of this client, beside its pool. Raises `RedisError` or `OSError`."""
        connection = redis.connection_pool.make_connection()
        await connection.connect()
        return cls(connection, connection.socket_timeout)

    @property
    def closed(self) -> bool:
        return self._transport.is_closing()

    @property
    def waiting(self) -> int:
        """Answers that are still to come."""
        return len(self._asked)

    def ask(self, command: bytes, answer: Answer) -> None:
        """Send one command. `answer` hears within the client's timeout, also when Redis does not answer."""
        self.send(command, (answer,))

    def send(self, commands: bytes, answers: tuple[Answer, ...]) -> None:
        """Send commands, each with who hears its answer."""
        if self.closed:
            for answer in answers:
                self._loop.call_soon(answer, self._end)
            return
        until = self._loop.time() + self._timeout_s
        for answer in answers:
            self._asked.append((until, answer))
        if self._alarm is None:
            self._alarm = self._loop.call_at(until, self._look)
        self._transport.write(commands)

    def close(self) -> None:
        self._transport.abort()

    def _look(self) -> None:
        """One timer for all that is asked: it is set again while there is anything."""
        self._alarm = None
        if not self._asked:
            return
        until = self._asked[0][0]
        if until > self._loop.time():
            self._alarm = self._loop.call_at(until, self._look)
        else:
            self._end = RedisTimeoutError("Redis did not answer in time")
            self._transport.abort()

    # -- what the event loop calls ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        try:
            while (found := self._parser.gets()) is not _NOT_YET:
                if not isinstance(found, hiredis.PushNotification):
                    self._asked.popleft()[1](found)
        except (InvalidResponse, IndexError) as error:
            self._end = RedisConnectionError(f"the answers of Redis make no sense: {error}")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        asked, self._asked = self._asked, deque()
        for _, answer in asked:
            answer(self._end)
