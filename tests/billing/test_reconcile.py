"""`reconcile` as an operator runs it."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection

from tenants.billing.settle import settle
from tests.billing.build import final, price, tenant

pytestmark = pytest.mark.django_db


def test_it_says_so_when_everything_agrees() -> None:
    tenant(), price()
    settle([final() for _ in range(5)], {})
    out = StringIO()
    call_command("reconcile", stdout=out)
    assert "agree" in out.getvalue()


def test_it_shows_the_rows_and_fails_when_something_does_not() -> None:
    tenant(), price()
    settle([final() for _ in range(5)], {})
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE billing_ledgerentry DISABLE TRIGGER USER")
        last = "(SELECT max(id) FROM billing_ledgerentry)"
        cursor.execute(f"UPDATE billing_ledgerentry SET quantity = quantity + 1 WHERE id = {last}")  # noqa: S608
        cursor.execute("ALTER TABLE tenants_auditevent DISABLE TRIGGER USER")
        cursor.execute("UPDATE tenants_auditevent SET action = 'nothing' WHERE position = 2")
    out = StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("reconcile", "--json", stdout=out)
    assert ended.value.code == 1
    facts = json.loads(out.getvalue())
    assert [x["check"] for x in facts["findings"]] == ["usage and its ledger transaction differ (I6)"]
    assert facts["audit_broken_at"] == 2
