"""JSON answers and OpenAI's error object."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson
from django.http import HttpResponse, HttpResponseBase, StreamingHttpResponse

from gateway.api.protocol import Headers, Lane
from gateway.errors import ApiError

__all__ = ["EventStream", "error_response", "json_response", "mark", "raw_json"]


def mark(response: HttpResponseBase, request: str) -> None:
    """What every answer carries."""
    response["x-request-id"] = request
    response["x-content-type-options"] = "nosniff"


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> HttpResponse:
    return raw_json(orjson.dumps(content), status, headers)


def raw_json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> HttpResponse:
    """JSON that is already bytes."""
    response = HttpResponse(body, status=status, content_type="application/json", headers=headers)
    response["content-length"] = str(len(body))
    return response


def error_response(error: ApiError) -> HttpResponse:
    """The error with its status. `x-should-retry` tells the official SDKs what the status leaves open."""
    response = json_response(error.body(), error.status, error.headers)
    response["x-should-retry"] = "true" if error.retry else "false"
    if error.retry_after_s is not None:
        response["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        response["www-authenticate"] = "Bearer"
    return response


class EventStream(StreamingHttpResponse):
    """Server-sent events. Sends them itself: each is bytes already, and Django's way has three iterators on it.

    `events` is set when there is something to say: the rest is made while the first token is waited for.
    """

    events: AsyncGenerator[bytes, None]

    def __init__(self, content_type: str, headers: dict[str, str]) -> None:
        super().__init__(content_type=content_type, headers=headers)
        self._lane: Lane | None = None
        self._head = b""
        self._begun = False

    def prepare(self, request: str, lane: Lane | None) -> None:
        """Make the head as it is now, to be sent with the first events in one write; without a lane nothing is."""
        mark(self, request)
        if lane is not None:
            self._lane, self._head = lane, lane.head(self.status_code, self._encoded())

    @property
    def prepared(self) -> bool:
        """`begin` may be called; else `send_to` sends all."""
        return self._lane is not None and not self._begun and self._lane.unused

    def begin(self, timing: str, events: bytes) -> None:
        """Send the head, with this `Server-Timing`, and the first events."""
        if self._lane is not None:
            self._begun = True
            self._lane.begin(b"%bserver-timing: %b\r\n" % (self._head, timing.encode("latin-1")), events)

    def _encoded(self) -> Headers:
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in self.items()]

    async def send_to(self, send: Callable[[Any], Awaitable[None]]) -> None:
        """As ASGI messages: the head (if it was not sent), a body for each part, the end."""
        if not self._begun:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self._encoded()})
        async with aclosing(self.events) as events:
            async for part in events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})
