"""One view per path: picks the method's handler and turns whatever goes wrong into OpenAI's error shape."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from django.http import HttpResponseBase
from redis.exceptions import RedisError

from gateway.api.handler import DataRequest
from gateway.api.responses import error_response
from gateway.dispatch.redis import queue_error
from gateway.errors import ApiError
from gateway.plane import current

__all__ = ["route"]

log = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[HttpResponseBase]]
View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]


def route(**methods: Handler) -> View:
    """A view of handlers by HTTP method, which are its `allowed`. HEAD is answered as GET."""
    if "GET" in methods:
        methods["HEAD"] = methods["GET"]
    allowed = ", ".join(sorted(methods))

    async def view(request: DataRequest, **kwargs: Any) -> HttpResponseBase:
        handler = methods.get(request.method or "")
        try:
            if handler is None:
                raise ApiError(
                    "method_not_allowed",
                    f"Not allowed to {request.method} here; use {allowed}.",
                    headers={"allow": allowed},
                )
            return await handler(request, **kwargs)
        except ApiError as error:
            return _refusal(request, error)
        except RedisError as error:
            return _refusal(request, queue_error(f"request {request.arrival.request}", error))

    view.allowed = allowed  # type: ignore[attr-defined]
    return view


def _refusal(request: DataRequest, error: ApiError) -> HttpResponseBase:
    if not request.arrival.admitted:
        current().admission.refused(request.arrival, error)
    return error_response(error)
