"""What is not even HTTP is refused in OpenAI's error shape too: `uvicorn --http gateway.api.protocol:JsonErrors`."""

from __future__ import annotations

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import ApiError

__all__ = ["MAX_HEADER_BYTES", "JsonErrors"]

MAX_HEADER_BYTES = 65_536
"""The parser itself would take headers of any size."""


class JsonErrors(HttpToolsProtocol):
    """uvicorn's protocol with another 400: its own is plain text, which clients of a JSON API can't read."""

    def send_400_response(self, msg: str) -> None:
        body = orjson.dumps(ApiError("invalid_http", "This is not a valid HTTP request.").body())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[400] + head + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.header_bytes += len(name) + len(value)
        if self.header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")
        super().on_header(name, value)

    def on_url(self, url: bytes) -> None:
        """A path is ASCII (RFC 9112); anything else would fail deeper inside, as a fault of the server."""
        if not url.isascii():
            raise ValueError("the request target is not ASCII")
        super().on_url(url)
