"""Marking minutes whose rows changed, in the transaction of the change."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from gateway.metering.models import DirtyMinute
from tenants.partitions import uuid_time

__all__ = ["mark", "minute_of"]


def minute_of(key: UUID) -> datetime:
    """The minute in which the request was admitted; usage, outcome and money of a request fall into the same one."""
    return uuid_time(key).replace(second=0, microsecond=0)


def mark(keys: Iterable[UUID]) -> None:
    """Have the minutes of these requests recomputed."""
    minutes = sorted({minute_of(key) for key in keys})
    DirtyMinute.objects.bulk_create(DirtyMinute(minute=minute) for minute in minutes)
