"""I3, I6: one settlement per request whatever is redelivered, for the tokens that were really made."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
import pytest
from django.db import connection

from engine.protocol.messages import Timeline
from tenants.billing.models import LedgerEntry, LedgerTransaction, Settlement, UsageRecord
from tenants.billing.reconcile import reconcile
from tenants.billing.selectors import balance, usage_page
from tenants.billing.settle import Unreadable, check, settle
from tenants.partitions import uuid_floor, uuid_time
from tests.billing.build import COST, final, in_threads, price, request_id, tenant


@pytest.mark.django_db
def test_i3_redelivery_across_a_month_end_bills_once() -> None:
    tenant(), price()
    end = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0) + timedelta(days=32)
    midnight = end.replace(day=1)
    last, first = request_id(midnight - timedelta(milliseconds=1)), request_id(midnight)
    finals = [final(last), final(first)]
    assert [x.new for x in settle(finals, {})] == [True, True]
    assert [x.new for x in settle(list(reversed(finals)), {})] == [False, False]
    assert (UsageRecord.objects.count(), Settlement.objects.count()) == (2, 2)
    assert balance("acme", "USD") == (-2 * COST, 1)
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(DISTINCT tableoid) FROM billing_usagerecord")
        assert cursor.fetchone()[0] == 2


@pytest.mark.django_db
def test_i3_twice_in_one_batch_is_once_and_the_first_stands() -> None:
    tenant(), price()
    request = request_id()
    answers = settle([final(request), final(request, completion_tokens=999, epoch=1)], {})
    assert [x.new for x in answers] == [True, False]
    assert UsageRecord.objects.get().completion_tokens == 30
    assert {x.balance_nano for x in answers} == {-20_500}


@pytest.mark.django_db(transaction=True)
def test_i3_two_workers_with_the_same_batch_settle_it_once() -> None:
    tenant(), tenant("umbrella"), price()
    finals = [final(tenant=slug) for slug in ("acme", "umbrella") for _ in range(20)]
    batches = [finals, list(reversed(finals)), finals[10:] + finals[:10], finals[::-2] + finals[::2]]
    answers: list[list] = [[] for _ in batches]
    in_threads(
        [lambda n=n, batch=batch: answers[n].extend(settle(batch, {})) for n, batch in enumerate(batches)]  # type: ignore[misc]
    )
    assert sum(x.new for answer in answers for x in answer) == 40 == UsageRecord.objects.count()
    assert balance("acme", "USD")[0] == balance("umbrella", "USD")[0] == -20 * COST
    assert reconcile() == []


@pytest.mark.django_db
@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error", "expired", "lost"])
def test_i6_every_ending_is_charged_for_the_tokens_really_made(reason: str) -> None:
    tenant(), price()
    f = final(reason=reason, prompt_tokens=10, cached_tokens=0, completion_tokens=3, wasted_tokens=7)
    settled = settle([f], {})[0]
    row = UsageRecord.objects.get()
    assert (row.reason, row.prompt_tokens, row.completion_tokens, row.wasted_tokens) == (reason, 10, 3, 7)
    assert settled.money == row.money == Decimal("0.0000022")  # what was wasted is declared, never billed
    quantities = LedgerEntry.objects.filter(quantity__isnull=False).values_list("account__kind", "quantity")
    assert dict(quantities) == {"revenue_input": 10, "revenue_output": 3}
    assert reconcile() == []


@pytest.mark.django_db
def test_nothing_computed_leaves_a_settlement_and_no_usage_row() -> None:
    tenant(), price()
    f = final(prompt_tokens=0, cached_tokens=0, completion_tokens=0, reason="abort")
    assert settle([f], {})[0].new
    assert not UsageRecord.objects.exists() and not LedgerTransaction.objects.exists()
    assert not settle([f], {})[0].new
    assert reconcile() == []


@pytest.mark.django_db
def test_usage_without_a_price_is_kept_and_shown_as_unrated() -> None:
    tenant()
    f = final()
    assert settle([f], {})[0].money is None
    assert UsageRecord.objects.get().price_version is None
    assert [(x.check, x.row[1]) for x in reconcile()] == [("unrated usage", "tiny")]


@pytest.mark.django_db
def test_the_price_class_is_that_of_the_pools_model() -> None:
    tenant(), price("small"), price("default", output_nano_per_mtok=0)
    assert settle([final()], {"tiny": "small"})[0].money == COST
    other = settle([final()], {})[0].money
    assert other is not None and other < COST


@pytest.mark.django_db
def test_all_or_nothing() -> None:
    tenant(), price()
    seen: list[int] = []

    def fail(keys: object) -> None:
        seen.append(UsageRecord.objects.count())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        settle([final(), final()], {}, fail)
    assert seen == [2]
    assert not UsageRecord.objects.exists() and not Settlement.objects.exists() and not LedgerEntry.objects.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"request": "not-a-uuid"},
        {"request": "6ba7b810-9dad-11d1-80b4-00c04fd430c8"},
        {"prompt_tokens": -1},
        {"completion_tokens": 2**60},
        {"cached_tokens": 101},
        {"engine_s": float("nan")},
        {"timeline": Timeline(queued_s=float("inf"))},
        {"at_ms": -5},
        {"pool": "a\0b"},
    ],
)
def test_a_record_that_contradicts_itself_is_named(change: dict) -> None:
    check(final())
    with pytest.raises(Unreadable):
        check(msgspec.structs.replace(final(), **change))


@pytest.mark.django_db
def test_reconcile_shows_what_was_altered_behind_the_triggers_back() -> None:
    tenant(), price()
    requests = [request_id() for _ in range(3)]
    settle([final(r) for r in requests], {})
    assert reconcile() == []
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE billing_usagerecord DISABLE TRIGGER USER")
        cursor.execute("UPDATE billing_usagerecord SET completion_tokens = 31 WHERE request_id = %s", [requests[0]])
        cursor.execute("UPDATE billing_balance SET amount = amount + 1")
    found = reconcile()
    assert sorted(x.check for x in found) == [
        "balance differs from its entries",
        "usage and its ledger transaction differ (I6)",
    ]
    assert requests[0] in {str(x.row[0]).replace("-", "") for x in found}


def fill(count: int) -> None:
    """Usage rows of twenty tenants over the last hour, straight into the table."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO billing_usagerecord (request_id, tenant, tier, pool, engine, epoch, reason, code, prompt_tokens,
                cached_tokens, completion_tokens, wasted_tokens, engine_s, joules, parked_s, parks, finished_at,
                currency, money)
            SELECT overlay(sluice_uuid_floor(now() - n * interval '1 second' / 100)::text
                           placing '7' || lpad(to_hex(n %% 4096), 3, '0') || '-8' from 15)::uuid,
                   't' || n %% 20, 'interactive', 'tiny', 'e', 0, 'stop', '', 10, 0, 10, 0, 0.1, 0, 0, 0, now(),
                   'USD', 0.001
            FROM generate_series(1, %s) AS n""",
            [count],
        )
        cursor.execute("ANALYZE billing_usagerecord")


@pytest.mark.django_db
def test_a_page_of_usage_is_found_by_key_through_an_index_at_any_depth() -> None:
    fill(60_000)
    seen: list[UsageRecord] = []
    for _ in range(3):
        page = list(usage_page(["t7"], seen[-1].request_id if seen else None, size=100))
        seen += page
    ids = [row.request_id for row in seen]
    assert len(ids) == 300 and ids == sorted(set(ids), reverse=True)
    assert {row.tenant for row in seen} == {"t7"}
    deep = uuid_floor(uuid_time(ids[0]) - timedelta(minutes=8))
    for tenants, before in ((["t7"], None), (["t7"], deep), (["t7", "t9"], deep)):
        plan = usage_page(tenants, before, size=50).explain(analyze=True, buffers=True)
        assert "Seq Scan" not in plan, plan
        assert "Index" in plan
