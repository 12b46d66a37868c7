"""How this process talks to Redis."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

__all__ = ["connect"]

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
