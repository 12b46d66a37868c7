"""Reading a request's body under limits that count what it is after decompression."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.errors import ApiError

__all__ = ["Disconnected", "read_body"]

Receive = Callable[[], Awaitable[Any]]

_TIMEOUT_S = 30.0
_RATE = 65_536
"""Bytes a second: who sends at least as many has as long as his body takes; who trickles has the time above."""
_INFLATED_HERE = 1024
"""Compressed bytes that can't become more than a megabyte, a millisecond or two; more is inflated in a thread."""
_PIECE = 65_536
"""What follows a member is copied by zlib: at most this much of it, once for each member."""
_MEMBERS_MAX = 1024
_DRAIN_FACTOR = 16
"""An oversized body is read to its end (and thrown away) up to this multiple of the limit: a client that is cut off
while it still sends can't read the 413 that tells it why."""


class Disconnected(Exception):
    """The client left before its request was complete."""


async def read_body(headers: dict[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The whole body, decompressed. `ApiError` 413, 415, 408 or 400."""
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if encoding not in ("identity", "", "gzip", "deflate"):
        raise ApiError("unsupported_media_type", f"The content encoding '{encoding[:32]}' is not supported; use gzip.")
    try:
        async with asyncio.timeout(_TIMEOUT_S) as timeout:
            raw = await _collect(headers, receive, limit, timeout)
    except TimeoutError:
        raise ApiError("request_timeout", "The request body did not arrive in time.") from None
    if encoding in ("identity", ""):
        return raw
    if len(raw) > _INFLATED_HERE:
        return await asyncio.to_thread(_inflate, raw, encoding, limit)
    return _inflate(raw, encoding, limit)


async def _collect(headers: dict[bytes, bytes], receive: Receive, limit: int, timeout: asyncio.Timeout) -> bytes:
    started = asyncio.get_running_loop().time()
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit * _DRAIN_FACTOR:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        timeout.reschedule(started + _TIMEOUT_S + min(size, limit) / _RATE)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
            if size > limit * _DRAIN_FACTOR:
                raise _too_large(limit)
        if not message.get("more_body", False):
            break
    if size > limit:
        raise _too_large(limit)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _inflate(raw: bytes, encoding: str, limit: int) -> bytes:
    """A gzip body may have several members (RFC 1952, 2.2): their contents follow one another."""
    view, parts, size, position, members = memoryview(raw), list[bytes](), 0, 0, 0
    while not members or position < len(raw):
        if members == (_MEMBERS_MAX if encoding == "gzip" else 1):
            raise ApiError("invalid_encoding", f"Something follows the end of the {encoding} request body.")
        # 47: zlib or gzip, told apart by the header. 31: gzip.
        inflater = zlib.decompressobj(15 if encoding == "deflate" else 31 if members else 47)
        members += 1
        while not inflater.eof:
            piece = view[position : position + _PIECE]
            if not piece:
                raise ApiError("invalid_encoding", f"The {encoding} request body is incomplete.")
            try:
                part = inflater.decompress(piece, limit + 1 - size)
            except zlib.error as error:
                raise ApiError("invalid_encoding", f"The request body is not valid {encoding}: {error}.") from None
            parts.append(part)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            position += len(piece) - len(inflater.unused_data)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError("request_too_large", f"The request body is larger than {limit} bytes.")
