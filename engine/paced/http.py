"""The clock behind HTTP: just enough of `POST /v1/chat/completions` as a stream for a gateway to stand before it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import cast

from engine.paced.pace import Agenda, Pace, Stream

__all__ = ["HttpFace"]

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_MODELS = json.dumps({"object": "list", "data": [{"id": "paced", "object": "model"}]}).encode()
_MOST_UNREAD = 8 << 20
"""Bytes that may wait for a reader before its connection is closed."""


class HttpFace:
    """All connections and their one clock."""

    def __init__(self) -> None:
        self._agenda = Agenda()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, port, backlog=8192)

    def add(self, stream: Stream) -> None:
        self._agenda.add(stream)
        self._set()

    def _set(self) -> None:
        """One timer for all, at the time of the next token."""
        due = self._agenda.next
        if self._timer is not None and self._timer.when() <= due and not self._timer.cancelled():
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(due, self._tick) if due < math.inf else None

    def _tick(self) -> None:
        self._timer = None
        # The loop's timers may ring up to a millisecond early.
        for stream in self._agenda.take(time.monotonic() + 0.0005):
            cast("_Connection", stream.owner).say(stream)
        self._set()


class _Connection(asyncio.Protocol):
    """One client; one answer at a time."""

    def __init__(self, face: HttpFace) -> None:
        self._face = face
        self._raw = b""
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._stream.gone = True

    def data_received(self, data: bytes) -> None:
        self._raw += data
        while (end := self._raw.find(b"\r\n\r\n")) >= 0:
            head = self._raw[:end].split(b"\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head[1:] if b": " in line)
            size = int(fields.get(b"content-length", b"0"))
            if b"chunked" in fields.get(b"transfer-encoding", b""):
                size = self._raw.find(b"0\r\n\r\n", end) - end + 1
                if size <= 0:
                    return
            if len(self._raw) < end + 4 + size:
                return
            body, self._raw = self._raw[end + 4 : end + 4 + size], self._raw[end + 4 + size :]
            self._answer(head[0].split(b" ")[0], body)

    def _answer(self, method: bytes, body: bytes) -> None:
        if method != b"POST":
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_MODELS)
            self._transport.write(head + _MODELS)
            return
        text = body.decode("utf-8", "replace")
        start = text.find('"max_tokens":')
        digits = text[start + 13 : start + 23].strip() if start >= 0 else ""
        total = int("".join(c for c in digits.split(",")[0] if c.isdigit()) or 64)
        self._stream = Stream(Pace.of(text), time.monotonic(), max(1, total), self)
        self._transport.write(_HEAD)
        self._face.add(self._stream)

    def say(self, stream: Stream) -> None:
        """The token just made, and at the end what ends a stream."""
        if self._transport.get_write_buffer_size() > _MOST_UNREAD:
            self._transport.abort()
            return
        index = stream.made - 1
        role = b'"role":"assistant",' if index == 0 else b""
        event = _event(b'{%b"content":"%c"}' % (role, ord("a") + index % 26), b"null")
        if stream.done:
            event += _event(b"{}", b'"length"') + b"data: [DONE]\n\n"
        frame = b"%x\r\n%b\r\n" % (len(event), event)
        self._transport.write(frame + b"0\r\n\r\n" if stream.done else frame)


def _event(delta: bytes, finish: bytes) -> bytes:
    """Of the size that real servers' events have."""
    return (
        b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
        b'"created":1700000000,"model":"paced","system_fingerprint":"fp_0123456789ab","choices":[{"index":0,"delta":%b,"logprobs":null,'
        b'"finish_reason":%b}]}\n\n' % (delta, finish)
    )
