"""What happens to a request, as one schema. Metrics, traces, the console, explain and SLO verdicts are made from these.

An event is emitted once, by whoever makes it happen; nothing else counts anything. `since_s` is the monotonic duration
since the request's previous event in the same process (0 for the first); `at_ms` is wall time, for ordering between
processes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ["Event", "Kind"]


class Kind(StrEnum):
    """The life of a request. The gateway emits received to queued, first/last sent; the engine pulled to finished."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    REFUSED = "refused"
    QUEUED = "queued"
    PULLED = "pulled"
    FIRST_TOKEN = "first_token"  # noqa: S105
    PARKED = "parked"
    RESUMED = "resumed"
    LAST_TOKEN = "last_token"  # noqa: S105
    FINISHED = "finished"
    FIRST_SENT = "first_sent"
    LAST_SENT = "last_sent"
    SETTLED = "settled"
    CLOSED = "closed"


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One thing that happened to one request."""

    request: str
    kind: str
    at_ms: int
    since_s: float
    source: str
    """Id of the gateway, engine or settler that emitted it."""
    tenant: str = ""
    tier: str = ""
    pool: str = ""
    attributes: dict[str, str | int | float | bool | None] = {}
