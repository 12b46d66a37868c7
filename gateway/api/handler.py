"""The data plane's own way into Django: no middleware, sessions, signals or worker threads on a request's path."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any

import uuid_utils
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.http import HttpResponseBase

from gateway.admission.admission import Arrival
from gateway.api.body import Disconnected, read_body
from gateway.api.responses import error_response
from gateway.errors import ApiError

__all__ = ["DataHandler", "DataRequest", "arrival_of", "new_request_id"]

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_TRACEPARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class DataRequest(ASGIRequest):
    """A request whose body was read under our limits. `arrival` is what admission needs of it."""

    urlconf = "gateway.urls_data"
    arrival: Arrival
    raw: bytes


class DataHandler(ASGIHandler):
    """Reads, answers, and stops answering when the client goes away, also before the first byte."""

    request_class = DataRequest

    def load_middleware(self, is_async: bool = False) -> None:
        self._view_middleware: list[Any] = []
        self._template_response_middleware: list[Any] = []
        self._exception_middleware: list[Any] = []
        self._middleware_chain = self._get_response_async  # type: ignore[attr-defined]

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
        body = await read_body(headers, receive, settings.SLUICE_MAX_BODY_BYTES)
        try:
            request = self.request_class(scope, BytesIO(body))
        except UnicodeDecodeError:
            raise ApiError("invalid_encoding", "The request's path is not valid UTF-8.") from None
        request.arrival, request.raw = arrival, body
        return request

    async def _race(self, answer: Any, receive: Receive) -> None:
        """Answer until the client leaves."""
        answering = asyncio.create_task(answer)
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _answer(self, request: DataRequest, arrival: Arrival, send: Send) -> None:
        try:
            response = await self._middleware_chain(request)
        except Exception:
            log.exception("request %s", arrival.request)
            response = error_response(ApiError("internal_error", "The server had an error; try again."))
        try:
            await self._send(response, arrival, send)
        finally:
            response.close()

    async def _send(self, response: HttpResponseBase, arrival: Arrival, send: Send) -> None:
        response["x-request-id"] = arrival.request
        response["x-content-type-options"] = "nosniff"
        await self.send_response(response, send)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
