"""Reads of the price book, balances and usage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.db.models import QuerySet

from tenants.billing.models import Balance, LedgerAccount, UsageRecord
from tenants.billing.pricebook import PriceBook
from tenants.billing.rating import PriceFacts, nano
from tenants.threads import off_loop

__all__ = [
    "BalanceNano",
    "balance",
    "balance_nano",
    "load_balance_nano",
    "load_price_facts",
    "price_facts",
    "usage_page",
]


def load_price_facts(price_class: str, at: datetime) -> PriceFacts | None:
    """The published version in force at a time; of a class that isn't in the price book, that of `default`."""
    return PriceBook([price_class], at, at).at(price_class, at)


price_facts = off_loop(load_price_facts)


@dataclass(frozen=True, slots=True)
class BalanceNano:
    """A tenant's balance for `account` in Redis: nano-units rounded down, and the sequence that orders it."""

    balance_nano: int
    sequence: int


def balance(tenant: str, currency: str) -> tuple[Decimal, int]:
    """(amount, sequence) of the tenant's account; (0, 0) before its first entry."""
    row = Balance.objects.filter(
        account__kind=LedgerAccount.Kind.TENANT, account__tenant__slug=tenant, account__currency=currency
    ).first()
    return (row.amount, row.sequence) if row else (Decimal(0), 0)


def load_balance_nano(tenant: str, currency: str) -> BalanceNano:
    """What `admit` needs after Redis lost the account."""
    amount, sequence = balance(tenant, currency)
    return BalanceNano(nano(amount), sequence)


balance_nano = off_loop(load_balance_nano)


def usage_page(tenants: Iterable[str], before: UUID | None = None, size: int = 50) -> QuerySet[UsageRecord]:
    """Newest first, by key: the next page starts `before` the last id of this one. Cost doesn't grow with depth."""
    rows = UsageRecord.objects.filter(tenant__in=list(tenants))
    if before is not None:
        rows = rows.filter(request_id__lt=before)
    return rows.order_by("-request_id")[:size]
