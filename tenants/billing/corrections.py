"""Correcting history by adding to it: a reversal names what it undoes, then the right entries are posted (I2)."""

from __future__ import annotations

from uuid import UUID

from django.db import transaction

from tenants import audit
from tenants.audit import Actor
from tenants.billing.ledger import AccountKey, Line, Posting, post
from tenants.billing.models import LedgerTransaction, UsageRecord
from tenants.billing.rating import PriceFacts, rate
from tenants.billing.settle import usage_lines

__all__ = ["rerate", "reverse"]

Kind = LedgerTransaction.Kind


@transaction.atomic
def reverse(actor: Actor, row: LedgerTransaction, note: str) -> LedgerTransaction:
    """Post the opposite of a transaction. A second reversal of the same one is refused by the database."""
    audit.lock()
    lines = tuple(
        Line(
            AccountKey(e.account.kind, e.account.tenant.slug if e.account.tenant else "", e.account.currency),
            -e.amount,
            None if e.quantity is None else -e.quantity,
            e.unit,
        )
        for e in row.entries.select_related("account__tenant").order_by("id")
    )
    undone = post(Posting(Kind.REVERSAL, lines, request_id=row.request_id, reverses=row.pk, note=note))
    audit.record(actor, "ledger.reverse", f"transaction:{row.pk}", after={"by": undone.pk, "note": note})
    return undone


@transaction.atomic
def rerate(actor: Actor, request_id: UUID, price: PriceFacts, note: str) -> LedgerTransaction:
    """Charge a settled request by another price version; what it was charged before is reversed."""
    audit.lock()
    usage = UsageRecord.objects.get(request_id=request_id)
    standing = LedgerTransaction.objects.filter(
        request_id=request_id, kind__in=[Kind.USAGE, Kind.ADJUSTMENT], reversal__isnull=True
    )
    for row in standing.order_by("id"):
        reverse(actor, row, note)
    cost = rate(price, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    lines = usage_lines(usage.tenant, price.currency, cost)
    row = post(Posting(Kind.ADJUSTMENT, lines, request_id=request_id, price_version=price.version, note=note))
    after = {"transaction": row.pk, "price_version": price.version, "note": note}
    audit.record(actor, "ledger.rerate", f"request:{request_id.hex}", tenant=usage.tenant, after=after)
    return row
