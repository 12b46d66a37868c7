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
from gateway.dispatch.wire import Wire, pack

__all__ = ["ReplyReader", "entries"]

log = logging.getLogger(__name__)

_BLOCK_MS = 1000
_COUNT = 256
_RETRY_S = 0.1
_deltas = msgspec.msgpack.Decoder(list[Delta])


class ReplyReader:
    """Reads, hands out, trims what it has read. First tokens, and a lot of the others, are handed out before the next
    read is asked for: that takes as long as to send one of them."""

    def __init__(self, redis: Redis, stream: str, fanout: Fanout) -> None:
        self._redis, self._stream, self._fanout = redis, stream, fanout
        self._last = b"0-0"

    async def run(self) -> None:
        """Until cancelled. A lost connection is retried; what the stream still holds is read from where it stood."""
        while True:
            try:
                wire = await Wire.open(self._redis)
                try:
                    await self._read_on(wire)
                finally:
                    wire.close()
            except (RedisError, OSError) as error:
                log.warning("reply stream: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _read_on(self, wire: Wire) -> None:
        """Until an answer is an error, which is raised."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ask(handed_out: bytes) -> None:
            if over.done():
                return
            if self._fanout.full:
                asyncio.get_running_loop().call_soon(ask, handed_out)  # each turn of the loop hands a lot out
                return
            # The trim rides on the next read, for one round trip; what has not been handed out yet stays.
            trim = pack("XTRIM", self._stream, "MINID", _after(handed_out))
            read = pack("XREAD", "COUNT", _COUNT, "BLOCK", _BLOCK_MS, "STREAMS", self._stream, self._last)
            wire.send(trim + read, (end, take))

        def end(found: Any) -> None:
            if isinstance(found, Exception) and not over.done():
                over.set_exception(found)

        def take(found: Any) -> None:
            end(found)
            if over.done():
                return
            entries, before = _raw_entries(found), self._last
            if entries:
                self._last = entries[-1][0]
            try:
                for _, fields in entries:
                    self._give(fields)
            finally:
                ask(before)

        ask(self._last)
        await over

    def _give(self, fields: list[bytes]) -> None:
        try:
            deltas = _deltas.decode(fields[fields.index(b"d") + 1])
        except (ValueError, IndexError, msgspec.DecodeError) as error:
            log.error("an entry of the reply stream can't be read: %s", error)
            return
        self._fanout.give(deltas)


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
