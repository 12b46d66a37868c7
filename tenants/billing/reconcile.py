"""The proof that usage and ledger agree, or the rows where they don't (I1, I3, I6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection

__all__ = ["Finding", "reconcile"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row that breaks an invariant."""

    check: str
    row: tuple[Any, ...]


# Each returns only rows that are wrong. A request that had no price is listed as unrated until it is rated.
_CHECKS: dict[str, str] = {
    "transaction does not sum to zero (I1)": """
        SELECT e.transaction_id, a.currency, sum(e.amount)
        FROM billing_ledgerentry e JOIN billing_ledgeraccount a ON a.id = e.account_id
        GROUP BY 1, 2 HAVING sum(e.amount) <> 0""",
    "balance differs from its entries": """
        SELECT a.id, coalesce(b.amount, 0), s.total
        FROM billing_ledgeraccount a
        JOIN (SELECT account_id, sum(amount) AS total FROM billing_ledgerentry GROUP BY 1) s ON s.account_id = a.id
        LEFT JOIN billing_balance b ON b.account_id = a.id
        WHERE a.kind = 'tenant' AND coalesce(b.amount, 0) <> s.total""",
    "usage without settlement (I3)": """
        SELECT u.request_id FROM billing_usagerecord u
        WHERE NOT EXISTS (SELECT FROM billing_settlement s WHERE s.request_id = u.request_id)""",
    "usage and its ledger transaction differ (I6)": """
        SELECT coalesce(u.request_id, t.request_id), u.money, t.money, u.quantity, t.quantity
        FROM (SELECT request_id, money, prompt_tokens + completion_tokens AS quantity
              FROM billing_usagerecord WHERE price_version_id IS NOT NULL) u
        FULL JOIN (SELECT t.request_id, -sum(e.amount) FILTER (WHERE a.kind = 'tenant') AS money,
                          coalesce(sum(e.quantity), 0) AS quantity
                   FROM billing_ledgertransaction t
                   JOIN billing_ledgerentry e ON e.transaction_id = t.id
                   JOIN billing_ledgeraccount a ON a.id = e.account_id
                   WHERE t.kind = 'usage' GROUP BY t.request_id) t ON t.request_id = u.request_id
        WHERE u.money IS DISTINCT FROM t.money OR u.quantity IS DISTINCT FROM t.quantity""",
    "unrated usage": """
        SELECT u.request_id, u.pool FROM billing_usagerecord u
        WHERE u.price_version_id IS NULL AND NOT EXISTS (
            SELECT FROM billing_ledgertransaction t WHERE t.request_id = u.request_id AND t.kind = 'adjustment')""",
}


def reconcile(checks: Sequence[str] = tuple(_CHECKS), limit: int = 1000) -> list[Finding]:
    """Run the checks; an empty answer is the proof."""
    findings: list[Finding] = []
    with connection.cursor() as cursor:
        for name in checks:
            cursor.execute(f"{_CHECKS[name]} LIMIT {int(limit)}")
            findings += [Finding(name, tuple(row)) for row in cursor.fetchall()]
    return findings
