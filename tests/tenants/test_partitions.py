"""Months of a table partitioned on its UUIDv7 key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from tenants.billing.models import UsageRecord
from tenants.billing.settle import settle
from tenants.partitions import ensure_months, uuid_floor, uuid_time
from tests.billing.build import final, price, request_id, tenant

TABLE = "billing_usagerecord"
times = st.datetimes(datetime(2000, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))


def partition_of(key: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT tableoid::regclass::text FROM {TABLE} WHERE request_id = %s", [UUID(key)])  # noqa: S608
        return str(cursor.fetchone()[0])


@given(times)
def test_the_time_in_a_key_is_the_time_it_was_made(at: datetime) -> None:
    key = UUID(request_id(at))
    assert timedelta(0) <= at - uuid_time(key) < timedelta(milliseconds=1)
    assert uuid_floor(uuid_time(key)) <= key < uuid_floor(uuid_time(key) + timedelta(milliseconds=1))


@pytest.mark.django_db
def test_the_same_in_sql() -> None:
    for at in (datetime(1999, 12, 31, 23, 59, 59, 999000, UTC), datetime(2026, 2, 28, 1, 2, 3, 4000, UTC)):
        with connection.cursor() as cursor:
            cursor.execute("SELECT sluice_uuid_floor(%s), sluice_uuid_time(%s)", [at, UUID(request_id(at))])
            assert cursor.fetchone() == (uuid_floor(at), at)


@pytest.mark.django_db
def test_rows_fall_into_the_month_of_their_key_and_none_is_lost() -> None:
    tenant(), price()
    now = datetime.now(UTC)
    ids = [request_id(now), request_id(datetime(2019, 5, 5, tzinfo=UTC))]
    settle([final(request) for request in ids], {})
    assert partition_of(ids[0]) == f"{TABLE}_{now:%Y_%m}"
    assert partition_of(ids[1]) == f"{TABLE}_default"
    assert UsageRecord.objects.count() == 2


@pytest.mark.django_db
def test_months_are_created_ahead_once_and_never_over_rows_of_the_default() -> None:
    later = datetime(2031, 11, 15, tzinfo=UTC)
    names = [f"{TABLE}_{x}" for x in ("2031_11", "2031_12", "2032_01")]
    assert ensure_months(TABLE, later, ahead=2) == names
    assert ensure_months(TABLE, later, ahead=2) == []
    tenant(), price()
    late = request_id(datetime(2035, 1, 31, 23, 59, tzinfo=UTC))
    settle([final(late)], {})
    assert ensure_months(TABLE, datetime(2035, 1, 1, tzinfo=UTC), ahead=1) == [f"{TABLE}_2035_02"]
    assert partition_of(late) == f"{TABLE}_default"
