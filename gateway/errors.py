"""One table of stable error codes, and the exception that carries one from anywhere in the data plane to the client.

A code never changes its meaning; clients may switch on it. 429: there is capacity, but you are over your limit or
share. 503: there is no capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODES", "ApiError", "Code"]


@dataclass(frozen=True, slots=True)
class Code:
    """What every error of this code has in common. `retry`: the same request may succeed later, unchanged."""

    status: int
    type: str
    retry: bool = False


_INVALID = "invalid_request_error"
_LIMIT = "rate_limit_error"
_SERVER = "server_error"

CODES: dict[str, Code] = {
    # the request itself
    "invalid_json": Code(400, _INVALID),
    "duplicate_key": Code(400, _INVALID),
    "nested_too_deep": Code(400, _INVALID),
    "missing_required_parameter": Code(400, _INVALID),
    "invalid_type": Code(400, _INVALID),
    "invalid_value": Code(400, _INVALID),
    "unsupported_parameter": Code(400, _INVALID),
    "unsupported_value": Code(400, _INVALID),
    "context_length_exceeded": Code(400, _INVALID),
    "invalid_grammar": Code(400, _INVALID),
    "invalid_image": Code(400, _INVALID),
    "invalid_http": Code(400, _INVALID),
    "invalid_host": Code(400, _INVALID),
    "invalid_encoding": Code(400, _INVALID),
    "request_timeout": Code(408, _INVALID, retry=True),
    "request_too_large": Code(413, _INVALID),
    "unsupported_media_type": Code(415, _INVALID),
    # who asks
    "missing_api_key": Code(401, _INVALID),
    "invalid_api_key": Code(401, _INVALID),
    "api_key_expired": Code(401, _INVALID),
    "ip_not_allowed": Code(403, "permission_error"),
    "scope_not_allowed": Code(403, "permission_error"),
    "tier_not_allowed": Code(403, "permission_error"),
    # what is asked for
    "model_not_found": Code(404, _INVALID),
    "not_found": Code(404, _INVALID),
    "resume_unknown": Code(404, _INVALID),
    "stream_moved": Code(409, _INVALID),
    "method_not_allowed": Code(405, _INVALID),
    "idempotency_in_flight": Code(409, "idempotency_error", retry=True),
    "idempotency_conflict": Code(422, "idempotency_error"),
    "idempotency_result_lost": Code(409, "idempotency_error"),
    # limits
    "concurrency_limit": Code(429, _LIMIT, retry=True),
    "rate_limit_exceeded": Code(429, _LIMIT, retry=True),
    "tenant_queue_full": Code(429, _LIMIT, retry=True),
    "insufficient_quota": Code(429, "insufficient_quota"),
    # capacity and faults
    "internal_error": Code(500, _SERVER, retry=True),
    "engine_error": Code(500, _SERVER, retry=True),
    "engine_fault": Code(500, _SERVER, retry=True),
    "no_engine": Code(503, _SERVER, retry=True),
    "tier_queue_full": Code(503, _SERVER, retry=True),
    "engine_lost": Code(503, _SERVER, retry=True),
    "queue_lost": Code(503, _SERVER, retry=True),
    "queue_timeout": Code(503, _SERVER, retry=True),
    "identity_unavailable": Code(503, _SERVER, retry=True),
    "backend_unavailable": Code(503, _SERVER, retry=True),
    "shutting_down": Code(503, _SERVER, retry=True),
    "slow_client": Code(503, _SERVER, retry=True),
}


class ApiError(Exception):
    """An answer other than success. `message` is shown to the client, so it never holds a secret or an internal."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code if code in CODES else "engine_error"
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    @property
    def status(self) -> int:
        return CODES[self.code].status

    @property
    def type(self) -> str:
        return CODES[self.code].type

    @property
    def retry(self) -> bool:
        return CODES[self.code].retry

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
