"""The deltas of one adopted request, from its kept stream: first all that was made before, then what comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.keys import Keys
from engine.protocol.messages import Delta
from gateway.dispatch.reader import entries
from gateway.dispatch.reply import Reply
from gateway.errors import ApiError

__all__ = ["follow"]

log = logging.getLogger(__name__)

_BLOCK_MS = 1000
_COUNT = 64
_HIGH = 512
"""A client that reads slowly holds up the replay, not the engine: the stream keeps the rest."""
_RETRY_S = 0.1
_deltas = msgspec.msgpack.Decoder(list[Delta])


async def follow(redis: Redis, keys: Keys, reply: Reply, deliver: Callable[[list[Delta], int], None]) -> None:
    """Until the reply has ended. `deliver` also gets when the deltas were kept (ms), and drops what comes twice."""
    stream, record = keys.out(reply.request), keys.request(reply.request)
    last, over = b"0-0", False
    while not reply.ended:
        if reply.waiting > _HIGH:
            await asyncio.sleep(_RETRY_S)
            continue
        try:
            answer = await redis.xread({stream: last}, count=_COUNT, block=None if over else _BLOCK_MS)
            if not answer and over:
                reply.fail(ApiError("engine_lost", "This answer was never finished."))
                return
            if not answer:  # an engine says its last word before the request ends: what is missing then never comes
                over = await cast("Awaitable[bytes | None]", redis.hget(record, "state")) in (None, b"finished")
        except (RedisError, OSError) as error:
            log.warning("kept stream: %s", error)
            await asyncio.sleep(_RETRY_S)
            continue
        for entry, fields in entries(answer):
            last = entry
            deliver(_deltas.decode(fields[b"d"]), int(entry.partition(b"-")[0]))
