"""The audit trail: one row per change, in the transaction of the change, chained by hash so that an edit shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from django.utils import timezone

from tenants.models import AuditEvent, User

__all__ = ["GENESIS", "SYSTEM", "Actor", "broken_at", "lock", "record"]

GENESIS = bytes(32)
_LOCK = 0x5_1C1_A0D1  # advisory lock that puts writers of the chain in a row


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes a change: a user, or a part of the system named by `label`."""

    label: str
    user: User | None = None

    @classmethod
    def of(cls, user: User) -> Actor:
        return cls(user.get_username(), user)


SYSTEM = Actor("system")


def record(
    actor: Actor,
    action: str,
    target: str,
    *,
    tenant: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> AuditEvent:
    """Append to the chain. Must run in the transaction of the change itself (T1)."""
    lock()
    last = AuditEvent.objects.order_by("-position").values_list("position", "hash").first()
    event = AuditEvent(
        position=(last[0] + 1) if last else 1,
        at=timezone.now(),
        actor=actor.user,
        actor_label=actor.label,
        tenant=tenant,
        action=action,
        target=target,
        before=_plain(before),
        after=_plain(after),
        previous=bytes(last[1]) if last else GENESIS,
    )
    event.hash = _hash(event)
    event.save(force_insert=True)
    return event


def lock() -> None:
    """Hold the end of the chain until the transaction ends. `record` does it too.

    Verbs that move money do it first: two of them could else each hold a balance that the other waits for.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("an audit row is written in the transaction of its change")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def broken_at(batch: int = 1000) -> int | None:
    """Position of the first row that doesn't follow from the one before it, or None when the chain holds (T2)."""
    expected, previous = 1, GENESIS
    for event in AuditEvent.objects.order_by("position").iterator(batch):
        if event.position != expected or bytes(event.previous) != previous or bytes(event.hash) != _hash(event):
            return expected
        expected, previous = expected + 1, bytes(event.hash)
    return None


def _plain(value: Mapping[str, Any] | None) -> Any:
    return None if value is None else json.loads(json.dumps(value, cls=DjangoJSONEncoder, sort_keys=True))


def _hash(event: AuditEvent) -> bytes:
    at: datetime = event.at
    body = [
        event.position,
        int(at.timestamp()) * 1_000_000 + at.microsecond,
        event.actor_id,
        event.actor_label,
        event.tenant,
        event.action,
        event.target,
        event.before,
        event.after,
    ]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(bytes(event.previous) + text.encode()).digest()
