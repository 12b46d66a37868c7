"""The data plane's own way into Django: no middleware, sessions, signals or worker threads on a request's path."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from io import BytesIO
from typing import Any

import uuid_utils
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.http import HttpResponseBase
from django.urls import ResolverMatch, get_resolver

from gateway.admission.admission import Arrival
from gateway.api.body import Disconnected, read_body
from gateway.api.protocol import LANE, Lane
from gateway.api.responses import EventStream, error_response, mark
from gateway.api.schemas.classify import MAX_BODY_BYTES
from gateway.errors import ApiError

__all__ = ["DataHandler", "DataRequest", "arrival_of", "new_request_id"]

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_BODY_BYTES = {"/v1/classify": MAX_BODY_BYTES}
"""Routes that take more than the setting says."""
_TRACEPARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class DataRequest(ASGIRequest):
    """A request whose body was read under our limits. `arrival` is what admission needs of it."""

    urlconf = "gateway.urls_data"
    arrival: Arrival
    raw: bytes

    @property
    def lane(self) -> Lane | None:
        """The short way to the client, under a server that has it."""
        lane: Lane | None = (self.scope.get("extensions") or {}).get(LANE)
        return lane


class DataHandler(ASGIHandler):
    """Reads, answers, and stops answering when the client goes away, also before the first byte."""

    request_class = DataRequest

    def load_middleware(self, is_async: bool = False) -> None:
        """There is none: a path is looked up and its view called."""
        self._resolver = get_resolver(DataRequest.urlconf)
        self._known: dict[str, ResolverMatch] = {}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        arrival = arrival_of(scope)
        try:
            request = await self._request(scope, receive, arrival)
        except Disconnected:
            return
        except ApiError as error:
            response: HttpResponseBase = error_response(error)
            # The body may not have been read to its end: the connection can't be used again.
            response["connection"] = "close"
            await self._send(response, arrival, send)
            return
        await self._race(self._answer(request, arrival, send), receive)

    async def _request(self, scope: Any, receive: Receive, arrival: Arrival) -> DataRequest:
        headers = dict(scope["headers"])
        _check_host(scope["headers"])
        if not scope["path"].startswith("/"):
            # `OPTIONS *`: no view answers for the server as a whole, and URL patterns know paths only.
            raise ApiError("not_found", f"Unknown request URL: {scope['method']} {scope['path'][:200]}.")
        limit = max(settings.SLUICE_MAX_BODY_BYTES, _BODY_BYTES.get(scope["path"], 0))
        body = await read_body(headers, receive, limit)
        try:
            request = self.request_class(scope, BytesIO(body))
        except UnicodeDecodeError:
            raise ApiError("invalid_encoding", "The request's path is not valid UTF-8.") from None
        request.arrival, request.raw = arrival, body
        return request

    async def _race(self, answer: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Answer until the client leaves, or is cut off because it does not read."""
        answering = asyncio.create_task(answer)
        leaving = asyncio.create_task(_cancel_when_left(receive, answering))
        try:
            await answering
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # not the answer alone: the server stops
                raise
        finally:
            leaving.cancel()

    async def _answer(self, request: DataRequest, arrival: Arrival, send: Send) -> None:
        try:
            match = self._match(request.path_info)
            response = await match.func(request, *match.args, **match.kwargs)
        except Exception:
            log.exception("request %s", arrival.request)
            response = error_response(ApiError("internal_error", "The server had an error; try again."))
        try:
            await self._send(response, arrival, send)
        finally:
            _close(response)

    def _match(self, path: str) -> ResolverMatch:
        """Every path matches: the last pattern takes what no other does."""
        match = self._known.get(path)
        if match is None:
            match = self._resolver.resolve(path)
            if not match.kwargs and match.route:  # of fixed routes there are few, of everything else too many
                self._known[path] = match
        return match

    async def _send(self, response: HttpResponseBase, arrival: Arrival, send: Send) -> None:
        mark(response, arrival.request)
        if isinstance(response, EventStream):
            await response.send_to(send)
        else:
            await self.send_response(response, send)


async def _cancel_when_left(receive: Receive, answering: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


def _close(response: HttpResponseBase) -> None:
    """Without Django's signal: what hangs on it closes database connections, of which this thread has none."""
    for close in response._resource_closers:  # type: ignore[attr-defined]
        close()
    response.closed = True


def new_request_id() -> str:
    """Time-ordered, so that rows and partitions are."""
    return str(uuid_utils.uuid7().hex)


def arrival_of(scope: Any) -> Arrival:
    """The facts of a connection that admission needs."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    client = scope.get("client")
    named = (headers.get(b"x-client-request-id") or headers.get(b"x-request-id", b"")).decode("latin-1")
    trace = headers.get(b"traceparent", b"")
    authorization = headers.get(b"authorization")
    return Arrival(
        request=new_request_id(),
        received=time.monotonic(),
        received_ms=int(time.time() * 1000),
        address=client[0] if client else None,
        authorization=authorization.decode("latin-1") if authorization is not None else None,
        client_request_id=named if _CLIENT_ID.fullmatch(named) else "",
        trace=trace.decode() if _TRACEPARENT.fullmatch(trace) else "",
    )


def _check_host(headers: list[tuple[bytes, bytes]]) -> None:
    """Nothing here depends on the host, but what stands behind or before may read it otherwise than we do."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (hosts and hosts[0] and not _HOST.fullmatch(hosts[0])):
        raise ApiError("invalid_host", "The Host header is malformed.")
