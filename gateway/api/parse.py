"""A request's body as a checked request object."""

from __future__ import annotations

from typing import Any

from gateway.api.handler import DataRequest
from gateway.api.schemas.decode import decode_body
from gateway.errors import ApiError
from gateway.plane import Plane

__all__ = ["parse", "parse_body"]

_BIG_BODY = 65_536
"""Larger bodies are parsed in a thread: a megabyte takes milliseconds that other streams would wait for."""


async def parse_body(plane: Plane, request: DataRequest, kind: type[Any]) -> Any:
    """Decode, validate, and check the rules between fields."""
    _check_json(request)
    return await parse(plane, request.raw, kind)


async def parse(plane: Plane, raw: bytes, kind: type[Any]) -> Any:
    """The same of a body that came otherwise than by HTTP."""
    if len(raw) > _BIG_BODY:
        body = await plane.prompts.off_loop(lambda: decode_body(raw, kind))
    else:
        body = decode_body(raw, kind)
    body.check()
    return body


def _check_json(request: DataRequest) -> None:
    """A body that says it is something else than JSON is not guessed at."""
    kind = request.META.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError("unsupported_media_type", "Send the request body as application/json.")
