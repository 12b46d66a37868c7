"""The outcomes stream: what each client saw, with its verdict, as one row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

from django.db import transaction

from engine.protocol.messages import Outcome
from gateway.metering.marks import mark
from gateway.metering.models import RequestOutcome
from gateway.metering.slo import Seen, Targets, judge
from tenants import selectors, services
from tenants.billing.retry import retrying
from tenants.partitions import uuid_time

__all__ = ["check", "commit"]


def check(outcome: Outcome) -> UUID:
    """The request's key. Raises ValueError with the reason."""
    key = UUID(outcome.request)
    uuid_time(key)
    times = (outcome.ttft_s, outcome.tpot_s, outcome.stall_s, outcome.total_s)
    if not all(math.isfinite(x) and x >= 0 for x in times if x is not None):
        raise ValueError(f"a duration that is no number: {times}")
    if not 0 < outcome.received_ms < 2**47:
        raise ValueError(f"time out of range: {outcome.received_ms}")
    if min(outcome.delivered_tokens, outcome.prompt_tokens) < 0:
        raise ValueError("negative token count")
    return key


def commit(outcomes: Sequence[Outcome]) -> None:
    """Write the rows that aren't there yet and mark their minutes (M1)."""
    retrying(lambda: _commit(outcomes))


@transaction.atomic
def _commit(outcomes: Sequence[Outcome]) -> None:
    keys = [check(outcome) for outcome in outcomes]
    targets = selectors.TargetHistory.load({outcome.tier for outcome in outcomes})
    rows = [
        _row(key, outcome, targets) for key, outcome in sorted(zip(keys, outcomes, strict=True), key=lambda x: x[0])
    ]
    RequestOutcome.objects.bulk_create(rows, ignore_conflicts=True)
    mark(keys)
    used: dict[str, datetime] = {}
    for row in rows:
        if row.key:
            used[row.key] = max(row.received_at, used.get(row.key, row.received_at))
    services.touch_keys(used)


def _row(key: UUID, o: Outcome, history: selectors.TargetHistory) -> RequestOutcome:
    found = history.at(o.tier, uuid_time(key))
    targets = Targets(*found) if found else None
    verdict = judge(targets, Seen(o.stream, o.status, o.reason, o.ttft_s, o.tpot_s, o.total_s, o.delivered_tokens))
    return RequestOutcome(
        request_id=key,
        tenant=_text(o.tenant, 48),
        project=_text(o.project, 48),
        key=_text(o.key, 16),
        tier=_text(o.tier, 48),
        pool=_text(o.pool, 200),
        model=_text(o.model, 200),
        kind=_text(o.kind, 16),
        stream=o.stream,
        status=o.status,
        reason=_text(o.reason, 32),
        code=_text(o.code, 64),
        client_request_id=_text(o.client_request_id, 200),
        received_at=_time(o.received_ms / 1000),
        finished_at=_time(o.received_ms / 1000 + o.total_s),
        ttft_s=o.ttft_s,
        tpot_s=o.tpot_s,
        stall_s=o.stall_s,
        total_s=o.total_s,
        delivered_tokens=o.delivered_tokens,
        prompt_tokens=o.prompt_tokens,
        ttft_target_ms=targets.ttft_ms if targets else None,
        tpot_target_ms=targets.tpot_ms if targets else None,
        ttft_met=verdict.ttft_met,
        tpot_met=verdict.tpot_met,
        good=verdict.good,
    )


def _text(value: str, limit: int) -> str:
    """Postgres has no NUL in text."""
    return value.replace("\0", "")[:limit]


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
