"""The one reader of this process's reply stream: one entry per engine step, unpacked to the requests it is for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.messages import Delta

__all__ = ["ReplyReader"]

log = logging.getLogger(__name__)

_BLOCK_MS = 1000
_COUNT = 256
_RETRY_S = 0.1
_deltas = msgspec.msgpack.Decoder(list[Delta])


class ReplyReader:
    """Reads, hands out, trims what it has read. `redis` is a client of its own: a blocking read holds a connection."""

    def __init__(self, redis: Redis, stream: str, deliver: Callable[[list[Delta]], None]) -> None:
        self._redis, self._stream, self._deliver = redis, stream, deliver
        self._last = b"0-0"

    async def run(self) -> None:
        """Until cancelled. A lost connection is retried; what the stream still holds is read from where it stood."""
        while True:
            try:
                await self._read()
            except (RedisError, OSError) as error:
                log.warning("reply stream: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        # The trim of the last batch rides on the next read: one round trip, and a crash between them loses nothing.
        pipe = self._redis.pipeline(transaction=False)
        pipe.xtrim(self._stream, minid=_after(self._last), approximate=False)
        pipe.xread({self._stream: self._last}, count=_COUNT, block=_BLOCK_MS)
        _, answer = await pipe.execute()
        for entry, fields in _entries(answer):
            self._last = entry
            try:
                deltas = _deltas.decode(fields[b"d"])
            except (KeyError, msgspec.DecodeError) as error:
                log.error("an entry of the reply stream can't be read: %s", error)
                continue
            self._deliver(deltas)


def _after(entry: bytes) -> str:
    """The smallest id greater than `entry`."""
    stamp, _, sequence = entry.decode().partition("-")
    return f"{stamp}-{int(sequence) + 1}"


def _entries(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD of one stream; a list of streams in RESP2, a map in RESP3."""
    if not answer:
        return []
    if isinstance(answer, dict):
        (batches,) = answer.values()
        return [entry for batch in batches for entry in batch]
    return list(answer[0][1])
