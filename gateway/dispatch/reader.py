"""The one reader of this process's reply stream: one entry per engine step, unpacked to the requests it is for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.messages import Delta
from gateway.dispatch.fanout import Fanout

__all__ = ["ReplyReader", "entries"]

log = logging.getLogger(__name__)

_BLOCK_MS = 1000
_COUNT = 256
_RETRY_S = 0.1
_deltas = msgspec.msgpack.Decoder(list[Delta])


class ReplyReader:
    """Reads, hands out, trims what it has read. `redis` is a client of its own: a blocking read holds a connection."""

    def __init__(self, redis: Redis, stream: str, fanout: Fanout) -> None:
        self._redis, self._stream, self._fanout = redis, stream, fanout
        self._last = b"0-0"

    async def run(self) -> None:
        """Until cancelled. A lost connection is retried; what the stream still holds is read from where it stood."""
        while True:
            try:
                await self._read_on()
            except (RedisError, OSError) as error:
                log.warning("reply stream: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _read_on(self) -> None:
        """On one connection, without the client's layers around it: they cost more than what a small step brings."""
        pool = self._redis.connection_pool
        connection = await pool.get_connection()
        try:
            while True:
                await self._read(connection)
        finally:
            # It may have been stopped between a question and its answer, which nobody else must get.
            await connection.disconnect(nowait=True)
            await pool.release(connection)

    async def _read(self, connection: Any) -> None:
        # The trim of the last batch rides on the next read: one round trip, and a crash between them loses nothing.
        trim = ("XTRIM", self._stream, "MINID", _after(self._last))
        read = ("XREAD", "COUNT", _COUNT, "BLOCK", _BLOCK_MS, "STREAMS", self._stream, self._last)
        await connection.send_packed_command(connection.pack_commands((trim, read)), check_health=False)
        await connection.read_response()
        for entry, fields in _raw_entries(await connection.read_response()):
            self._last = entry
            try:
                deltas = _deltas.decode(fields[fields.index(b"d") + 1])
            except (ValueError, IndexError, msgspec.DecodeError) as error:
                log.error("an entry of the reply stream can't be read: %s", error)
                continue
            self._fanout.give(deltas)
        await self._fanout.room()


def _after(entry: bytes) -> str:
    """The smallest id greater than `entry`."""
    stamp, _, sequence = entry.decode().partition("-")
    return f"{stamp}-{int(sequence) + 1}"


def entries(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD of one stream; a list of streams in RESP2, a map in RESP3."""
    if not answer:
        return []
    if isinstance(answer, dict):
        (batches,) = answer.values()
        return [entry for batch in batches for entry in batch]
    return list(answer[0][1])


def _raw_entries(answer: Any) -> list[tuple[bytes, list[bytes]]]:
    """The same of an answer that is as the server sent it: fields are a flat list of names and values."""
    if not answer:
        return []
    return list(next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1])
