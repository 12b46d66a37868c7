"""Verbs of money that people make: prices, top-ups, corrections. Each has its audit row in the same transaction."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from tenants import announce, audit
from tenants.audit import Actor
from tenants.billing import selectors
from tenants.billing.ledger import AccountKey, Line, Posting, ours, post, tenant_account
from tenants.billing.models import LedgerAccount, LedgerTransaction, Price, PriceVersion
from tenants.errors import Refused
from tenants.models import Tenant

__all__ = ["PUBLISH_LEAD", "announce_balance", "create_price", "publish", "top_up"]

PUBLISH_LEAD = timedelta(seconds=5)
"""A version that replaces one starts at least so far ahead: it is committed before a request can fall under it."""


@transaction.atomic
def create_price(actor: Actor, price_class: str, currency: str = "USD") -> Price:
    price = Price(price_class=price_class, currency=currency)
    price.full_clean()
    price.save(force_insert=True)
    audit.record(actor, "price.create", f"price:{price_class}", after={"currency": currency})
    return price


@transaction.atomic
def publish(
    actor: Actor,
    price: Price,
    *,
    input_nano_per_mtok: int,
    cached_nano_per_mtok: int,
    output_nano_per_mtok: int,
    valid_from: datetime | None = None,
) -> PriceVersion:
    """Publish the next version; the open one ends where it begins. The first may begin in the past.

    Raises Refused for a later one that would begin sooner than PUBLISH_LEAD from now (I4).
    """
    Price.objects.select_for_update().get(pk=price.pk)
    soonest = timezone.now() + PUBLISH_LEAD
    current = price.versions.filter(published_at__isnull=False, valid_to__isnull=True).first()
    start = valid_from or (soonest if current else timezone.now())
    if current is not None:
        if start < soonest:
            raise Refused("a new version of a price in force can't begin now or in the past")
        current.valid_to = start
        current.save(update_fields=["valid_to"])
    version = PriceVersion.objects.create(
        price=price,
        number=(price.versions.aggregate(last=Max("number"))["last"] or 0) + 1,
        input_nano_per_mtok=input_nano_per_mtok,
        cached_nano_per_mtok=cached_nano_per_mtok,
        output_nano_per_mtok=output_nano_per_mtok,
        valid_from=start,
        published_at=timezone.now(),
    )
    rates = {"input": input_nano_per_mtok, "cached": cached_nano_per_mtok, "output": output_nano_per_mtok}
    target = f"price:{price.price_class}/{version.number}"
    audit.record(actor, "price.publish", target, after={"nano_per_mtok": rates, "valid_from": start})
    return version


@transaction.atomic
def top_up(actor: Actor, tenant: Tenant, amount: Decimal, note: str) -> LedgerTransaction:
    """Credit received from the tenant. Raises Refused unless it is positive."""
    if amount <= 0:
        raise Refused("a top-up is positive")
    audit.lock()
    account: AccountKey = tenant_account(tenant.slug, tenant.currency)
    lines = (Line(account, amount), Line(ours(LedgerAccount.Kind.CASH, tenant.currency), -amount))
    row = post(Posting(LedgerTransaction.Kind.TOP_UP, lines, note=note))
    after = {"amount": amount, "currency": tenant.currency, "note": note}
    audit.record(actor, "balance.top_up", f"tenant:{tenant.slug}", tenant=tenant.slug, after=after)
    transaction.on_commit(lambda: announce_balance(tenant))
    return row


def announce_balance(tenant: Tenant) -> None:
    """Tell the data plane the tenant's generation and balance; an older sequence than it has is ignored there."""
    announce.publish(tenant.slug, tenant.generation, *selectors.load_balance_nano(tenant.slug))
