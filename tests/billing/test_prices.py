"""I4: a published version stands, versions never overlap, a request is rated by the one in force at its admission."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from tenants.billing import services
from tenants.billing.models import Price, PriceVersion, UsageRecord
from tenants.billing.selectors import load_price_facts, price_facts
from tenants.billing.settle import settle
from tenants.threads import off_loop
from tests.billing.build import ACTOR, COST, LONG_AGO, RATES, final, price, request_id, tenant

pytestmark = pytest.mark.django_db


def version(row: Price, number: int, start: datetime, end: datetime | None, **fields: Any) -> PriceVersion:
    """Straight into the table, past the services."""
    published = {"published_at": timezone.now(), "input_nano_per_mtok": 1}
    rates = {"cached_nano_per_mtok": 1, "output_nano_per_mtok": 1}
    return PriceVersion.objects.create(
        price=row, number=number, valid_from=start, valid_to=end, **(published | rates | fields)
    )


def day(number: int) -> datetime:
    return LONG_AGO + timedelta(days=number)


@pytest.mark.parametrize(("start", "end"), [(0, 11), (19, 30), (12, 13), (0, 99), (10, 20), (15, None)])
def test_i4_an_overlap_is_refused_by_the_database(start: int, end: int | None) -> None:
    row = services.create_price(ACTOR, "tiny")
    version(row, 1, day(10), day(20))
    with pytest.raises(IntegrityError, match="no_overlap"), transaction.atomic():
        version(row, 2, day(start), None if end is None else day(end))


def test_i4_neighbours_other_prices_and_drafts_may_be() -> None:
    row = services.create_price(ACTOR, "tiny")
    version(row, 1, day(10), day(20))
    version(row, 2, day(20), None)
    version(row, 3, day(0), day(10))
    version(row, 4, day(0), None, published_at=None)
    version(services.create_price(ACTOR, "other"), 1, day(0), None)


@pytest.mark.parametrize(
    "change",
    [
        "output_nano_per_mtok = 1",
        "valid_from = valid_from - interval '1 day'",
        "valid_to = now() - interval '1 second'",
        "valid_to = now() + interval '1 day', input_nano_per_mtok = 0",
        "published_at = NULL",
    ],
)
def test_i4_a_published_version_is_immutable(change: str) -> None:
    published = price()
    for sql in (f"UPDATE billing_priceversion SET {change}", "DELETE FROM billing_priceversion"):  # noqa: S608
        with pytest.raises(IntegrityError, match="is published"), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(sql)
    published.refresh_from_db()
    assert published.output_nano_per_mtok == RATES["output_nano_per_mtok"]


def test_i4_the_open_end_closes_once_and_only_in_the_future() -> None:
    first = price()
    start = timezone.now() + timedelta(hours=1)
    second = price(valid_from=start)
    first.refresh_from_db()
    assert (first.valid_to, second.number) == (start, 2)
    first.valid_to = start + timedelta(hours=1)
    with pytest.raises(IntegrityError), transaction.atomic():
        first.save()
    for sooner in (timezone.now(), LONG_AGO):
        with pytest.raises(ValueError, match="past"):
            price(valid_from=sooner)


def test_i4_a_request_is_rated_with_the_version_in_force_when_it_was_admitted() -> None:
    tenant()
    row = services.create_price(ACTOR, "tiny")
    change = timezone.now().replace(microsecond=0)
    version(row, 1, LONG_AGO, change, **RATES)
    doubled = {name: 2 * nano for name, nano in RATES.items()}
    new = version(row, 2, change, None, **doubled)
    before, at = request_id(change - timedelta(milliseconds=1)), request_id(change)
    late = int((change + timedelta(days=1)).timestamp() * 1000)  # both finish after the change
    settled = settle([final(before, at_ms=late), final(at, at_ms=late)], {})
    assert [x.money for x in settled] == [COST, 2 * COST]
    assert UsageRecord.objects.get(pk=at).price_version == new


def test_a_class_without_a_price_costs_what_default_costs_and_without_default_nothing_is_known() -> None:
    assert load_price_facts("unheard-of", timezone.now()) is None
    default = price("default", output_nano_per_mtok=7)
    facts = load_price_facts("unheard-of", timezone.now())
    assert facts is not None and (facts.version, facts.output_nano_per_mtok) == (default.pk, 7)
    assert load_price_facts("unheard-of", LONG_AGO - timedelta(days=1)) is None


@pytest.mark.django_db(transaction=True)
async def test_price_facts_from_the_event_loop() -> None:
    published = await off_loop(price)()
    facts = await price_facts("tiny", timezone.now())
    assert facts is not None and facts.version == published.pk and facts.currency == "USD"
