"""Idempotency-Key: the same key and body give the stored answer again, computed and billed once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from typing import cast

import msgspec
from django.http import HttpResponse
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.functions import Claim
from engine.protocol.keys import Keys
from engine.protocol.messages import decode, encode
from gateway.api.handler import DataRequest
from gateway.errors import ApiError

__all__ = ["MAX_RESULT_BYTES", "claim_of", "keep", "replay"]

log = logging.getLogger(__name__)

MAX_RESULT_BYTES = 1_048_576
"""Answers larger than this are not kept; asking for one again is an error, not a second computation."""
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_WAIT_S = (0.02, 0.05, 0.1, 0.3, 0.5)
"""The engine says that a request has ended a moment before its gateway has stored what it sent."""


class Result(msgspec.Struct, frozen=True, array_like=True):
    """An answer as it was sent. An empty body with `lost`: it was too large to keep."""

    content_type: str
    body: bytes
    lost: bool = False


def claim_of(request: DataRequest) -> Claim | None:
    """The claim that a request's header makes on its body, or None without one."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise ApiError(
            "invalid_value", "An Idempotency-Key is 1 to 255 visible ASCII characters.", param="idempotency-key"
        )
    digest = hashlib.sha256(f"{request.method} {request.path}\n".encode() + request.raw).hexdigest()
    return Claim(key, digest)


async def keep(redis: Redis, keys: Keys, request: str, claim: Claim, content_type: str, body: bytes) -> None:
    """Store an answer for as long as its claim lasts."""
    result = Result(content_type, body) if len(body) <= MAX_RESULT_BYTES else Result(content_type, b"", lost=True)
    try:
        await redis.set(keys.result(request), encode(result), px=claim.ttl_ms)
    except (RedisError, OSError) as error:
        log.warning("the answer of %s was not kept: %s", request, error)


async def replay(redis: Redis, keys: Keys, request: str) -> HttpResponse:
    """The stored answer of `request`."""
    result = await _read(redis, keys.result(request))
    for pause_s in _WAIT_S:
        if result is not None:
            break
        await asyncio.sleep(pause_s)
        result = await _read(redis, keys.result(request))
    if result is None or result.lost:
        raise ApiError("idempotency_result_lost", "This Idempotency-Key was answered, but the answer was not kept.")
    return HttpResponse(
        result.body,
        content_type=result.content_type,
        headers={"idempotency-replayed": "true", "content-length": str(len(result.body))},
    )


async def _read(redis: Redis, key: str) -> Result | None:
    raw = cast("bytes | None", await redis.get(key))
    return decode(raw, Result) if raw is not None else None
