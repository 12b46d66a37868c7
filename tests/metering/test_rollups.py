"""M2: rollups are recomputed from rows, so that recomputing changes nothing and lateness does no harm."""

from __future__ import annotations

import random
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, transaction

from gateway.metering import outcomes
from gateway.metering.marks import mark
from gateway.metering.models import DirtyMinute, MinuteRollup, RefusalTally, RequestOutcome
from gateway.metering.rollups import roll_up
from gateway.metering.tasks import roll_up as task
from tenants.billing.models import UsageRecord
from tenants.billing.settle import settle
from tests.billing.build import COST, final, in_threads, outcome, price, request_id, tenant

MINUTE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def rows() -> list[dict[str, Any]]:
    names = ("minute", "tenant", "tier", "pool")
    return [{k: v for k, v in row.items() if k != "id"} for row in MinuteRollup.objects.order_by(*names).values()]


@pytest.mark.django_db
def test_a_minute_tells_what_its_rows_tell() -> None:
    tenant(), price()
    ids = [request_id(MINUTE + timedelta(seconds=s)) for s in (0, 1, 59, 59)]
    other = request_id(MINUTE + timedelta(seconds=60))
    settle([final(r) for r in (*ids, other)], {}, mark)
    outcomes.commit(
        [
            outcome(ids[0], ttft_s=1.0),
            outcome(ids[1], ttft_s=3.0, tpot_s=0.2),
            outcome(ids[2], ttft_s=None, tpot_s=None, status=502, reason="error"),
            outcome(ids[3], ttft_s=0.1, total_s=3.0, tpot_s=None, stream=False),
        ]
    )
    RefusalTally.objects.create(
        minute=MINUTE, tenant="acme", tier="interactive", pool="tiny", status=429, code="x", count=4
    )
    assert task() == 2
    first, second = rows()
    assert (first["minute"], second["minute"]) == (MINUTE, MINUTE + timedelta(minutes=1))
    assert (first["requests"], first["refused"], first["errors"], first["judged"], first["good"]) == (4, 4, 1, 4, 2)
    assert (first["ttft_met"], first["ttft_missed"], first["tpot_met"], first["tpot_missed"]) == (2, 2, 1, 1)
    assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (400, 80, 120)
    assert (first["money"], first["currency"]) == (4 * COST, "USD")
    assert (first["ttft_p50_s"], round(first["ttft_p95_s"], 6)) == (2.0, 2.9)
    assert (second["requests"], second["judged"], second["good"]) == (1, 0, 0)  # settled, its outcome is not there yet
    assert not DirtyMinute.objects.exists()


@pytest.mark.django_db
def test_m2_recomputing_changes_nothing_and_what_comes_late_is_added_once() -> None:
    tenant(), tenant("umbrella"), price()
    draw = random.Random(7)
    late = [request_id(MINUTE + timedelta(seconds=draw.randrange(300))) for _ in range(10)]
    early = [request_id(MINUTE + timedelta(seconds=draw.randrange(300))) for _ in range(50)]

    def record(ids: list[str]) -> None:
        slugs = [draw.choice(["acme", "umbrella"]) for _ in ids]
        pairs = list(zip(ids, slugs, strict=True))
        settle([final(r, s) for r, s in pairs], {}, mark)
        outcomes.commit([outcome(r, s, ttft_s=draw.random() * 4) for r, s in pairs])

    record(early)
    task()
    before = rows()
    mark([row.pk for row in UsageRecord.objects.all()])
    task()
    assert rows() == before
    record(late)
    task()
    after = rows()
    assert sum(row["requests"] for row in after) == 60
    assert sum(row["money"] for row in after) == 60 * COST == sum(UsageRecord.objects.values_list("money", flat=True))
    MinuteRollup.objects.all().delete()
    mark([row.pk for row in RequestOutcome.objects.all()])
    task()
    assert rows() == after
    assert task() == 0


@pytest.mark.django_db(transaction=True)
def test_m2_a_mark_that_commits_during_a_recomputation_is_not_lost() -> None:
    tenant(), price()
    request = request_id(MINUTE)
    settle([final(request_id(MINUTE))], {}, mark)
    inside, go_on = threading.Event(), threading.Event()

    def slow_settle() -> None:
        with transaction.atomic():
            settle([final(request)], {}, mark)
            inside.set()
            assert go_on.wait(10)

    def recompute_meanwhile() -> None:
        assert inside.wait(10)
        assert roll_up() == [MINUTE]
        go_on.set()

    in_threads([slow_settle, recompute_meanwhile])
    assert rows()[0]["requests"] == 1
    assert roll_up() == [MINUTE]
    assert rows()[0]["requests"] == 2


@pytest.mark.django_db(transaction=True)
def test_only_one_recomputation_runs_at_a_time() -> None:
    tenant(), price()
    settle([final(request_id(MINUTE))], {}, mark)
    found: list[list[datetime]] = []

    def second() -> None:
        found.append(roll_up())
        connection.close()

    with transaction.atomic():
        assert roll_up() == [MINUTE]
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(10)
    assert found == [[]]
    assert [row["money"] for row in rows()] == [COST]
    assert isinstance(rows()[0]["money"], Decimal)
