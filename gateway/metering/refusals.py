"""The refusals stream, counted into the record. It has no acknowledgements: a cursor says how far it was read."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec
from django.db import transaction
from redis.client import Redis

from engine.protocol.keys import Keys
from engine.protocol.messages import Refusal, decode
from gateway.metering.models import DirtyMinute, RefusalTally, StreamCursor

__all__ = ["tally"]

_BATCH = 1000


def tally(redis: Redis, keys: Keys) -> int:
    """Count up to a batch of new refusals; the cursor moves in the same transaction, so each counts once (M1)."""
    client: Any = redis
    with transaction.atomic():
        StreamCursor.objects.get_or_create(stream="refusals", defaults={"last_id": "0-0"})
        cursor = StreamCursor.objects.select_for_update().get(stream="refusals")
        entries = client.xrange(keys.refusals, min=f"({cursor.last_id}", count=_BATCH)
        if not entries:
            return 0
        counts: Counter[tuple[datetime, str, str, str, int, str]] = Counter()
        for _, fields in entries:
            try:
                counts[_group(decode(fields.get(b"r", b""), Refusal))] += 1
            except (msgspec.MsgspecError, ValueError, OverflowError):
                continue
        RefusalTally.objects.bulk_create(
            RefusalTally(minute=m, tenant=tenant, tier=tier, pool=pool, status=status, code=code, count=count)
            for (m, tenant, tier, pool, status, code), count in counts.items()
        )
        DirtyMinute.objects.bulk_create(DirtyMinute(minute=m) for m in sorted({group[0] for group in counts}))
        cursor.last_id = entries[-1][0].decode()
        cursor.save(update_fields=["last_id"])
    return len(entries)


def _group(r: Refusal) -> tuple[datetime, str, str, str, int, str]:
    minute = datetime.fromtimestamp(r.at_ms // 60_000 * 60, UTC)
    tenant, tier, model, code = (x.replace("\0", "") for x in (r.tenant, r.tier, r.model, r.code))
    return minute, tenant[:48], tier[:48], model[:200], r.status, code[:64]
