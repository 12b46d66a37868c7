"""`GET /v1/models` and `GET /v1/models/{id}`, and whether this process lives and is ready."""

from __future__ import annotations

import ipaddress
from typing import Any

from django.http import HttpResponse, HttpResponseBase
from redis.exceptions import RedisError

from gateway.api.handler import DataRequest
from gateway.api.responses import json_response
from gateway.dispatch.registry import Model
from gateway.errors import ApiError
from gateway.observability.metrics import CONTENT_TYPE
from gateway.plane import current

__all__ = ["health", "metrics", "models", "not_found", "one_model", "ready"]


async def models(request: DataRequest) -> HttpResponseBase:
    admission = current().admission
    principal = await admission.identify(request.arrival, "inference")
    return json_response({"object": "list", "data": [_describe(m) for m in await admission.models(principal)]})


async def one_model(request: DataRequest, model: str) -> HttpResponseBase:
    admission = current().admission
    principal = await admission.identify(request.arrival, "inference")
    return json_response(_describe(await admission.find_model(request.arrival, principal, model)))


def _describe(model: Model) -> dict[str, Any]:
    card = model.card
    return {
        "id": card.model,
        "object": "model",
        "created": card.created_ms // 1000,
        "owned_by": card.owned_by,
        "context_length": card.context_length,
        "capabilities": list(card.capabilities),
        "aliases": list(card.aliases),
        "available": model.live > 0,
    }


async def health(request: DataRequest) -> HttpResponseBase:
    """The process answers. Nothing else is looked at: a restart would not mend a missing Redis."""
    return json_response({"status": "ok"})


async def ready(request: DataRequest) -> HttpResponseBase:
    """Whether a request sent now would find a queue and an engine; if not, why."""
    reasons = []
    plane = current()
    try:
        if not plane.dispatcher.connected:
            reasons.append("redis: no lease is held")
        elif not any(m.live for m in await plane.dispatcher.registry.all()):
            reasons.append("engine: none is registered and alive")
    except (RedisError, OSError):
        reasons.append("redis: not reachable")
    if reasons:
        return json_response({"status": "unavailable", "reasons": reasons}, 503)
    return json_response({"status": "ready", "gateway": plane.dispatcher.gateway})


async def metrics(request: DataRequest) -> HttpResponseBase:
    """Prometheus figures, for who asks from a private network and not through a proxy: they are not for customers."""
    if not _is_near(request):
        raise ApiError("not_found", f"Unknown request URL: {request.method} {request.path}.")
    return HttpResponse(current().metrics.render(), content_type=CONTENT_TYPE)


def _is_near(request: DataRequest) -> bool:
    if any(name in request.headers for name in ("x-forwarded-for", "forwarded", "x-real-ip")):
        return False
    try:
        address = ipaddress.ip_address(request.arrival.address or "127.0.0.1")  # a unix socket has no address
    except ValueError:
        return False
    return address.is_private


async def not_found(request: DataRequest, **kwargs: Any) -> HttpResponseBase:
    raise ApiError("not_found", f"Unknown request URL: {request.method} {request.path[:200]}.")
