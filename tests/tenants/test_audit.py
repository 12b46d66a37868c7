"""T1, T2: the audit trail is written with the change, never changes, and shows tampering."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction

from tenants import audit, services
from tenants.models import AuditEvent, Tenant
from tests.billing.build import ACTOR, in_threads, tenant


@pytest.mark.django_db
def test_t1_no_change_without_its_audit_row() -> None:
    acme = tenant()
    with connection.cursor() as cursor:  # a trail that can't be written to
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE tenants_auditevent ADD CONSTRAINT is_full CHECK (position < 0) NOT VALID")
    with pytest.raises(IntegrityError), transaction.atomic():
        services.update_tenant(ACTOR, acme, max_concurrent=5)
    assert Tenant.objects.get(pk=acme.pk).max_concurrent == -1


def test_t1_an_audit_row_needs_the_transaction_of_its_change() -> None:
    with pytest.raises(RuntimeError):
        audit.record(ACTOR, "nothing", "nobody")


@pytest.mark.django_db
def test_a_change_is_recorded_with_before_and_after() -> None:
    services.update_tenant(ACTOR, tenant(), max_concurrent=5, weight=2.0)
    event = AuditEvent.objects.order_by("-position")[0]
    assert (event.action, event.tenant, event.actor_label) == ("tenant.update", "acme", "tests")
    assert event.before == {"max_concurrent": -1, "weight": 1.0}
    assert event.after == {"max_concurrent": 5, "weight": 2.0}


@pytest.mark.django_db
@pytest.mark.parametrize("sql", ["UPDATE tenants_auditevent SET target = 'x'", "DELETE FROM tenants_auditevent"])
def test_t2_rows_are_refused_to_change(sql: str) -> None:
    tenant()
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE tenants_auditevent SET target = 'someone else' WHERE position = 3",
        """UPDATE tenants_auditevent SET after = '{"name": "x"}' WHERE position = 3""",
        "UPDATE tenants_auditevent SET at = at + interval '1 microsecond' WHERE position = 3",
        "DELETE FROM tenants_auditevent WHERE position = 3",
    ],
)
def test_t2_the_chain_shows_an_edit_made_behind_the_triggers_back(sql: str) -> None:
    tenant()
    tenant("umbrella")
    assert AuditEvent.objects.count() > 4
    assert audit.broken_at() is None
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE tenants_auditevent DISABLE TRIGGER tenants_auditevent_append_only")
        cursor.execute(sql)
    assert audit.broken_at() == 3


@pytest.mark.django_db(transaction=True)
def test_t2_writers_at_the_same_time_leave_one_chain() -> None:
    acme = tenant()
    start = AuditEvent.objects.count()
    in_threads([lambda n=n: services.create_project(ACTOR, acme, f"p{n}", "P") for n in range(12)])  # type: ignore[misc]
    positions = list(AuditEvent.objects.order_by("position").values_list("position", flat=True))
    assert positions == list(range(1, start + 13))
    assert audit.broken_at() is None
