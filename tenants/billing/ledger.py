"""The double-entry ledger. Whoever moves money posts here; nothing else writes entries or balances.

Locks are always taken in the same order (accounts by key, then balances by account), each set by one statement, so that
any number of writers over the same tenants can't deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone

from tenants.billing.models import LedgerAccount, LedgerEntry, LedgerTransaction
from tenants.models import Tenant

__all__ = ["AccountKey", "BalanceFacts", "Line", "Posting", "Unbalanced", "ours", "post", "post_many", "tenant_account"]

Kind = LedgerAccount.Kind


class Unbalanced(ValueError):
    """The lines of a posting don't sum to zero (I1)."""


@dataclass(frozen=True, slots=True, order=True)
class AccountKey:
    """An account by meaning. `tenant` is a slug, empty for our own accounts."""

    kind: str
    tenant: str
    currency: str


@dataclass(frozen=True, slots=True)
class Line:
    """One entry to be. Positive: the account gains."""

    account: AccountKey
    amount: Decimal
    quantity: int | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Posting:
    """One transaction to be."""

    kind: str
    lines: tuple[Line, ...]
    request_id: UUID | None = None
    reverses: int | None = None
    price_version: int | None = None
    note: str = ""
    at: datetime = field(default_factory=timezone.now)

    def check(self) -> None:
        """Raise Unbalanced unless each currency sums to zero."""
        totals: dict[str, Decimal] = defaultdict(Decimal)
        for line in self.lines:
            totals[line.account.currency] += line.amount
        off = {currency: total for currency, total in totals.items() if total}
        if off or not self.lines:
            raise Unbalanced(f"{self.kind} is off by {off or 'having no lines'}")


@dataclass(frozen=True, slots=True)
class BalanceFacts:
    """A tenant account after a posting; of two, the higher sequence is the newer."""

    account: AccountKey
    amount: Decimal
    sequence: int


def tenant_account(tenant: str, currency: str) -> AccountKey:
    """What we owe the tenant; it falls with use and below zero when the tenant owes us."""
    return AccountKey(Kind.TENANT, tenant, currency)


def ours(kind: LedgerAccount.Kind, currency: str) -> AccountKey:
    """One of the installation's own accounts."""
    return AccountKey(kind, "", currency)


def post(posting: Posting) -> LedgerTransaction:
    """Post one transaction. Raises Unbalanced."""
    return post_many([posting])[0][0]


@transaction.atomic
def post_many(postings: Sequence[Posting]) -> tuple[list[LedgerTransaction], list[BalanceFacts]]:
    """Post transactions, in order, and move the balances of the tenants' accounts they touch."""
    for posting in postings:
        posting.check()
    ids = _accounts({line.account for posting in postings for line in posting.lines})
    rows = LedgerTransaction.objects.bulk_create(
        LedgerTransaction(
            kind=p.kind,
            request_id=p.request_id,
            reverses_id=p.reverses,
            price_version_id=p.price_version,
            note=p.note,
            at=p.at,
        )
        for p in postings
    )
    LedgerEntry.objects.bulk_create(
        LedgerEntry(transaction=row, account_id=ids[x.account], amount=x.amount, quantity=x.quantity, unit=x.unit)
        for row, posting in zip(rows, postings, strict=True)
        for x in posting.lines
    )
    return rows, _move(ids, postings)


def _accounts(keys: Iterable[AccountKey]) -> dict[AccountKey, int]:
    """Ids of the accounts, made where missing."""
    wanted = sorted(set(keys))
    found = _known(wanted)
    missing = [key for key in wanted if key not in found]
    if missing:
        tenants = dict(
            Tenant.objects.filter(slug__in={k.tenant for k in missing if k.tenant}).values_list("slug", "id")
        )
        LedgerAccount.objects.bulk_create(
            [
                LedgerAccount(kind=k.kind, tenant_id=tenants[k.tenant] if k.tenant else None, currency=k.currency)
                for k in missing
            ],
            ignore_conflicts=True,
        )
        found |= _known(missing)
    return found


def _known(keys: Sequence[AccountKey]) -> dict[AccountKey, int]:
    rows = LedgerAccount.objects.filter(
        kind__in={k.kind for k in keys}, currency__in={k.currency for k in keys}
    ).values_list("kind", "tenant__slug", "currency", "id")
    if all(k.tenant for k in keys):
        rows = rows.filter(tenant__slug__in={k.tenant for k in keys})
    wanted = set(keys)
    found = {AccountKey(kind, slug or "", currency): pk for kind, slug, currency, pk in rows}
    return {key: pk for key, pk in found.items() if key in wanted}


def _move(ids: dict[AccountKey, int], postings: Sequence[Posting]) -> list[BalanceFacts]:
    """Add the tenants' amounts to their balances: one statement, rows locked in account order."""
    moved: dict[AccountKey, Decimal] = defaultdict(Decimal)
    for posting in postings:
        for line in posting.lines:
            if line.account.kind == Kind.TENANT:
                moved[line.account] += line.amount
    if not moved:
        return []
    by_id = {ids[key]: key for key in moved}
    order = sorted(by_id)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO billing_balance AS b (account_id, amount, sequence)
            SELECT account_id, amount, 1 FROM unnest(%s::bigint[], %s::numeric[]) AS m (account_id, amount)
            ORDER BY account_id
            ON CONFLICT (account_id) DO UPDATE SET amount = b.amount + excluded.amount, sequence = b.sequence + 1
            RETURNING account_id, amount, sequence
            """,
            [order, [moved[by_id[pk]] for pk in order]],
        )
        return [BalanceFacts(by_id[pk], amount, sequence) for pk, amount, sequence in cursor.fetchall()]
