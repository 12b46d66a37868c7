"""JSON answers and OpenAI's error object."""

from __future__ import annotations

from typing import Any

import orjson
from django.http import HttpResponse

from gateway.errors import ApiError

__all__ = ["error_response", "json_response", "raw_json"]


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
