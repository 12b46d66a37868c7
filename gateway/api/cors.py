"""Lets web pages of other origins call the API under `/v1`: answers preflights, marks answers as readable.

Keys are explicit bearer headers and cookies are never read, so a page can do no more here than the key it was given
allows. Everything outside `/v1` stays closed: `/metrics` is open to private networks, and a page in a browser there
is no part of them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from django.urls import get_resolver

from gateway.api.protocol import LANE, Headers, Lane

__all__ = ["EXPOSED", "cross_origin"]

App = Callable[[Any, Any, Any], Awaitable[None]]
Send = Callable[[Any], Awaitable[None]]

_LIMITS = [f"x-ratelimit-{part}-{of}" for of in ("requests", "tokens") for part in ("limit", "remaining", "reset")]
_OTHERS = ["x-request-id", "retry-after", "x-should-retry", "x-queue-depth", "server-timing", "idempotency-replayed"]
EXPOSED = ", ".join([*_OTHERS, *_LIMITS])
"""Response headers that a page may read, beside the few that it always may."""

_MAX_NAMES = 2048
_NAMES = re.compile(rb"[A-Za-z0-9_-]+(?:[ \t]*,[ \t]*[A-Za-z0-9_-]+)*")
_MAX_AGE_S = b"7200"
"""The most that Chromium keeps a preflight."""
_PREFLIGHT_VARY = b"origin, access-control-request-method, access-control-request-headers"


def cross_origin(app: App, origins: frozenset[str], urlconf: str) -> App:
    """`app`, open to pages of these origins (`*`: of all); `app` itself when there are none."""
    return _CrossOrigin(app, origins, urlconf) if origins else app


class _CrossOrigin:
    def __init__(self, app: App, origins: frozenset[str], urlconf: str) -> None:
        self._app, self._resolver = app, get_resolver(urlconf)
        self._all = "*" in origins
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        granted = self._granted(origin)
        if not scope["path"].startswith("/v1/") or (self._all and granted is None):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and granted is not None and (headers := self._preflight(scope)):
            headers.append((b"access-control-allow-origin", granted))
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body"})
        else:
            marks = self._marks(granted)
            lane: Lane | None = (scope.get("extensions") or {}).get(LANE)
            if lane is not None:
                lane.marks = marks
            await self._app(scope, receive, _marking(send, marks))

    def _granted(self, origin: bytes | None) -> bytes | None:
        """To whom the answer is given to read."""
        if origin is None:
            return None
        return b"*" if self._all else origin if origin in self._origins else None

    def _marks(self, granted: bytes | None) -> Headers:
        """What every answer carries. Where it depends on the origin, caches must know, also when there is none."""
        marks: Headers = [] if self._all else [(b"vary", b"origin")]
        if granted is not None:
            marks.append((b"access-control-allow-origin", granted))
            marks.append((b"access-control-expose-headers", EXPOSED.encode()))
        return marks

    def _preflight(self, scope: Any) -> Headers:
        """The answer's headers; none if this is not a preflight."""
        asked: dict[bytes, bytes] = dict(scope["headers"])
        # No browser sends a body with one; whoever does gets what any OPTIONS gets, where bodies are bounded.
        has_body = b"transfer-encoding" in asked or asked.get(b"content-length", b"0") != b"0"
        if b"access-control-request-method" not in asked or has_body:
            return []
        view: Any = self._resolver.resolve(scope["path"]).func
        headers = [
            # An unknown path allows everything, so that the page gets to read the 404.
            (b"access-control-allow-methods", view.allowed.encode()),
            (b"access-control-max-age", _MAX_AGE_S),
            (b"vary", _PREFLIGHT_VARY),
        ]
        names = asked.get(b"access-control-request-headers", b"")
        if len(names) <= _MAX_NAMES and _NAMES.fullmatch(names):
            headers.append((b"access-control-allow-headers", names))
        return headers


def _marking(send: Send, marks: Headers) -> Send:
    """`send` that adds to the head. No coroutine of its own: a stream calls it for every event."""

    def marked(message: Any) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *marks]
        return send(message)

    return marked
