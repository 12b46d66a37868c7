"""What is not even HTTP is refused in OpenAI's error shape too: `uvicorn --http gateway.api.protocol:JsonErrors`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.errors import ApiError

__all__ = ["HEAD_TIMEOUT_S", "LANE", "MAX_HEADER_BYTES", "Headers", "JsonErrors", "Lane"]

MAX_HEADER_BYTES = 65_536
"""The parser itself would take headers of any size, and keep a header that never ends for ever."""
HEAD_TIMEOUT_S = 30.0
"""From a connection's start, or a later request's first byte, to the end of the request's headers."""
LANE = "gateway.lane"
"""Name of the ASGI extension under which a request's scope has its `Lane`."""
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})


Headers = list[tuple[bytes, bytes]]


class Lane:
    """Straight to the client of one answer, for what need not be waited for.

    The server's `send` is a coroutine that looks at the state of the whole protocol: for each event of a stream that
    is half of what the event costs, and its head takes as long as all else between a first token and its client.
    """

    __slots__ = ("_cycle", "_flow", "_transport", "marks")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport
        self.marks: Headers = []
        """Headers that whoever stands around the application adds to its own."""

    @property
    def unused(self) -> bool:
        """Nothing was sent, and the head may come by `begin`. Else use `send`."""
        cycle = self._cycle
        return not (cycle.response_started or cycle.access_log or self._flow.write_paused or cycle.disconnected)

    def head(self, status: int, headers: Headers) -> bytes:
        """The head of a chunked answer, open for more headers."""
        lines = [STATUS_LINE[status], b"transfer-encoding: chunked\r\n"]
        for name, value in (*self._cycle.default_headers, *headers, *self.marks):
            lines += (name, b": ", value, b"\r\n")
        return b"".join(lines)

    def begin(self, head: bytes, part: bytes) -> None:
        """Such a head with the first part of the body, in one write."""
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding, cycle.expected_content_length = True, 0
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        self._transport.write(b"%b%b%x\r\n%b\r\n" % (head, end, len(part), part))

    @property
    def open(self) -> bool:
        """The client takes more, and a part can only be a chunk. Else use `send`, which waits for the client."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and cycle.response_started
            and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, part: bytes) -> None:
        """A part of the body, not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class JsonErrors(HttpToolsProtocol):
    """uvicorn's protocol with another 400 (its own is plain text, which clients of a JSON API can't read) and with
    bounds on what a client may send before there is a request that the application could refuse."""

    head_open = True
    """The headers of the next request are not complete."""
    head_bytes = 0
    """Received of it, without the first read."""
    header_bytes = 0
    _fresh = False
    _head_timer: asyncio.TimerHandle | None = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, ApiError("invalid_http", "This is not a valid HTTP request."))

    def _refuse(self, status: int, error: ApiError) -> None:
        body = orjson.dumps(error.body())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    # -- bounds on the head ------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.head_open:
            self._await_head()
        self._fresh = False
        self._feed(data)
        # A read in which another head became due is not counted: it may hold the body of the request before.
        if self.head_open and not self._fresh:
            self.head_bytes += len(data)
        if self.head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_late)

    def _expect_head(self) -> None:
        self.head_open, self._fresh, self.head_bytes = True, True, 0

    def _head_arrived(self) -> None:
        self.head_open = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # an answer to an earlier request is under way: it is not cut off
        else:
            self._refuse(408, ApiError("request_timeout", "The request's headers did not arrive in time."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.header_bytes = 0
        self._expect_head()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_open:
            return  # a trailer: nothing here reads them, and they must not pass for headers
        self.header_bytes += len(name) + len(value)
        if self.header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")
        super().on_header(name, value)

    def on_url(self, url: bytes) -> None:
        """A path is ASCII (RFC 9112); anything else would fail deeper inside, as a fault of the server."""
        if not url.isascii():
            raise ValueError("the request target is not ASCII")
        super().on_url(url)

    # -- upgrades that are not ours ----------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """A client that offers HTTP/2 (Java's does so by default) is served HTTP/1.1, with its body: the parser stops
        after the head of any upgrade, so that head is read again without the offer."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self._declines():
                head = self._head()
                self.parser = httptools.HttpRequestParser(self)
                self._feed(head + data[upgrade.args[0] :])

    def _should_upgrade(self) -> bool:
        # Only a GET can open a WebSocket (RFC 6455, 4.1); uvicorn would wait for ever on another.
        return self.scope.get("method") == "GET" and super()._should_upgrade()

    def _declines(self) -> bool:
        return self.parser.should_upgrade() and self.scope["method"] != "CONNECT" and not self._should_upgrade()

    def _head(self) -> bytes:
        line = b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        kept = [b"%s: %s\r\n" % (n, v) for n, v in self.headers if n not in _UPGRADE_HEADERS]
        return b"".join([line, *kept, b"\r\n"])

    def on_headers_complete(self) -> None:
        self._head_arrived()
        self.scope["method"] = self.parser.get_method().decode("ascii")
        if self._declines():
            return
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # else it became a WebSocket
            cast("dict[str, Any]", self.scope)["extensions"] = {LANE: Lane(self.cycle)}

    def on_message_complete(self) -> None:
        if not self._declines():
            super().on_message_complete()
        self._expect_head()
