"""How this process talks to Redis."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    ClusterDownError,
    DataError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine.protocol.functions import LayoutMismatch
from gateway.errors import ApiError

__all__ = ["connect", "is_away", "queue_error"]

log = logging.getLogger(__name__)

_TURN_S = 10.0
"""How long a request waits for a free connection: a burst of thousands is queued here, it is no outage."""


def connect(url: str, *, connections: int = 32, timeout_s: float = 2.0) -> Redis:
    """A client that fails within `timeout_s` when the server is away, so that a request gets its error in time.

    One retry only: it mends a connection that a restarted server has dropped, without hiding an outage.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=_TURN_S,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(ExponentialBackoff(cap=0.1, base=0.02), 1),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )
    pool.connection_class = type("Connection", (_HonoursCancel, pool.connection_class), {})
    return Redis(connection_pool=pool)


_CANT_NOW = (ClusterDownError, LayoutMismatch, OutOfMemoryError, ReadOnlyError, TryAgainError)
_CANT_NOW_WORDS = ("BUSY", "MISCONF", "NOREPLICAS")
"""First words of answers that redis-py has no class for: a script runs, the disk is full, replicas are missing."""


def is_away(error: RedisError | OSError) -> bool:
    """The server is not there or can't do its work now, and may later. Else what we sent was wrong: a fault of ours."""
    if isinstance(error, ResponseError):
        return isinstance(error, _CANT_NOW) or str(error).partition(" ")[0] in _CANT_NOW_WORDS
    return not isinstance(error, DataError)


def queue_error(what: str, error: RedisError | OSError) -> ApiError:
    """What the client is told, and the log: 503 while the server is away, 500 for a fault of ours."""
    if is_away(error):
        log.warning("%s: %s", what, error)
        return ApiError("backend_unavailable", "The queue can't be reached right now.", retry_after_s=2)
    log.error("%s: %s", what, error, exc_info=error)
    return ApiError("internal_error", "The server had an error; try again.")


class _HonoursCancel:
    """A connection that does not lose a cancel. redis-py sends under `asyncio.wait_for`, which before Python 3.12
    forgets one that comes when all was sent: a client's leaving would go unnoticed, and its request run to the end."""

    async def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(command, check_health)  # type: ignore[misc]
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # nobody will read the answer
            raise asyncio.CancelledError
