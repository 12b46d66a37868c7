"""Reads of the price book, balances and usage."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.db.models import QuerySet

from tenants.billing.models import Balance, LedgerAccount, UsageRecord
from tenants.billing.pricebook import PriceBook
from tenants.billing.rating import PriceFacts, nano
from tenants.models import Tenant
from tenants.threads import off_loop

__all__ = [
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


def balance(tenant: str, currency: str) -> tuple[Decimal, int]:
    """(amount, sequence) of the tenant's account; (0, 0) before its first entry."""
    row = Balance.objects.filter(
        account__kind=LedgerAccount.Kind.TENANT, account__tenant__slug=tenant, account__currency=currency
    ).first()
    return (row.amount, row.sequence) if row else (Decimal(0), 0)


def load_balance_nano(tenant: str) -> tuple[int, int]:
    """(nano-units rounded down, sequence) of a tenant's account in its own currency, for `account` in Redis."""
    currency = Tenant.objects.values_list("currency", flat=True).get(slug=tenant)
    amount, sequence = balance(tenant, currency)
    return nano(amount), sequence


balance_nano = off_loop(load_balance_nano)


def usage_page(tenants: Iterable[str], before: UUID | None = None, size: int = 50) -> QuerySet[UsageRecord]:
    """Newest first, by key: the next page starts `before` the last id of this one. Cost doesn't grow with depth."""
    rows = UsageRecord.objects.filter(tenant__in=list(tenants))
    if before is not None:
        rows = rows.filter(request_id__lt=before)
    return rows.order_by("-request_id")[:size]
