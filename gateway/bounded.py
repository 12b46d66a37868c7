"""Bounds on a request's body for an application that has none: Django reads it whole, however long and however slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

__all__ = ["bounded"]

Application = Callable[[Any, Any, Any], Awaitable[None]]

_TIMEOUT_S = 30.0


class _Refused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class _Body:
    """Counts what is received until the body has ended; then it is not in the way."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], limit: int, timeout_s: float) -> None:
        self._receive, self._left, self._limit = receive, limit, limit
        self._ends = asyncio.get_running_loop().time() + timeout_s
        self._complete = False

    async def receive(self) -> Any:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._ends):
                message = await self._receive()
        except TimeoutError:
            raise _Refused(408, "The request's body did not arrive in time.") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _Refused(413, f"The request's body is larger than {self._limit} bytes.")
        self._complete = not message.get("more_body", False)
        return message


def bounded(application: Application, limit: int, timeout_s: float = _TIMEOUT_S) -> Application:
    """An application whose requests have at most `limit` bytes of body, all of them there within `timeout_s`."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        try:
            await application(scope, _Body(receive, limit, timeout_s).receive, send)
        except _Refused as refused:
            content = orjson.dumps({"detail": refused.detail})
            # The rest of the body may still come: the connection can't be used again.
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers.append((b"content-length", str(len(content)).encode()))
            await send({"type": "http.response.start", "status": refused.status, "headers": headers})
            await send({"type": "http.response.body", "body": content})

    return call
