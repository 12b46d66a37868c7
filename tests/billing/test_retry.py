"""A transaction that Postgres breaks to end a deadlock is run again, and nothing else is."""

from __future__ import annotations

import threading

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction

from tenants.billing.retry import retrying
from tenants.models import Tenant
from tests.billing.build import in_threads, tenant


@pytest.mark.django_db(transaction=True)
def test_a_real_deadlock_ends_with_both_done() -> None:
    tenant("a"), tenant("b")
    barrier, attempts = threading.Barrier(2), []

    def raise_both(first: str, second: str) -> None:
        attempts.append(first)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL deadlock_timeout = '100ms'")
            for slug in (first, second):
                cursor.execute("UPDATE tenants_tenant SET weight = weight + 1 WHERE slug = %s", [slug])
                if len(attempts) <= 2 and slug == first:
                    barrier.wait(10)  # both hold one and want the other's

    in_threads([lambda: retrying(lambda: raise_both("a", "b")), lambda: retrying(lambda: raise_both("b", "a"))])
    assert set(Tenant.objects.values_list("weight", flat=True)) == {3.0}
    assert len(attempts) == 3


@pytest.mark.parametrize("error", [OperationalError("server closed the connection"), IntegrityError("twice")])
def test_other_errors_are_not_tried_again(error: Exception) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        retrying(fail)
    assert len(calls) == 1
