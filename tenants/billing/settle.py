"""Settling: usage becomes one settlement, one usage row and one ledger transaction per request, in one transaction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone

from engine.protocol.messages import Final
from tenants.billing import ledger
from tenants.billing.ledger import Line, Posting, ours, tenant_account
from tenants.billing.models import Balance, LedgerAccount, LedgerTransaction, UsageRecord
from tenants.billing.pricebook import PriceBook
from tenants.billing.rating import Charge, PriceFacts, nano, rate
from tenants.billing.retry import retrying
from tenants.models import Tenant
from tenants.partitions import uuid_time

__all__ = ["Settled", "Unreadable", "check", "settle", "usage_lines"]

UNIT = "token"
Kind = LedgerAccount.Kind


class Unreadable(ValueError):
    """A usage record that contradicts itself; it can't be billed and must not stop the others."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A request after settlement. `new`: not settled before (I3). No balance: its tenant has no account yet."""

    request: str
    tenant: str
    new: bool
    money: Decimal | None
    currency: str
    balance_nano: int | None
    sequence: int


@dataclass(frozen=True, slots=True)
class _Rated:
    """A Final with its price; `price` is None where the price book had none at its admission."""

    key: UUID
    final: Final
    price: PriceFacts | None
    charge: Charge | None


def check(final: Final) -> UUID:
    """The request's key. Raises Unreadable with the reason."""
    try:
        key = UUID(final.request)
        uuid_time(key)
    except ValueError as error:
        raise Unreadable(f"request id: {error}") from None
    counts = (final.prompt_tokens, final.cached_tokens, final.completion_tokens, final.wasted_tokens)
    if min(counts) < 0 or max(counts) > 2**53:
        raise Unreadable(f"token counts out of range: {counts}")
    if final.cached_tokens > final.prompt_tokens:
        raise Unreadable(f"{final.cached_tokens} cached of {final.prompt_tokens} prompt tokens")
    times = [x for x in (final.engine_s, final.joules, *_timeline(final)) if x is not None]
    if not all(math.isfinite(x) for x in times):
        raise Unreadable("a duration that is no number")
    if not 0 < final.at_ms < 2**47:
        raise Unreadable(f"time out of range: {final.at_ms}")
    if any("\0" in text for text in (final.pool, final.tier, final.tenant, final.engine, final.reason, final.code)):
        raise Unreadable("a NUL character")
    return key


def settle(
    finals: Sequence[Final],
    price_classes: Mapping[str, str],
    within: Callable[[Iterable[UUID]], None] = lambda keys: None,
) -> list[Settled]:
    """Settle checked Finals of existing tenants, all or nothing; the answer is in their order.

    `price_classes` is by pool. `within` is called inside the transaction with the keys that were new.
    """
    return retrying(lambda: _settle(finals, price_classes, within))


@transaction.atomic
def _settle(
    finals: Sequence[Final], price_classes: Mapping[str, str], within: Callable[[Iterable[UUID]], None]
) -> list[Settled]:
    by_key = {check(final): final for final in reversed(finals)}  # twice in one batch: the first stands
    new = _claim(sorted(by_key))
    rated = _rate([(key, by_key[key]) for key in sorted(new)], price_classes)
    UsageRecord.objects.bulk_create(_row(x) for x in rated if _used(x.final))
    _, balances = ledger.post_many([_posting(x) for x in rated if x.price is not None and _used(x.final)])
    within(x.key for x in rated)
    return _answers(finals, {x.key: x for x in rated}, balances)


def _claim(keys: Sequence[UUID]) -> set[UUID]:
    """Of the keys those that no one settled before: the primary key decides, in one order for all writers."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO billing_settlement (request_id, settled_at) SELECT key, %s FROM unnest(%s::uuid[]) AS t (key) "
            "ORDER BY key ON CONFLICT DO NOTHING RETURNING request_id",
            [timezone.now(), list(keys)],
        )
        return {key for (key,) in cursor.fetchall()}


def _rate(items: Sequence[tuple[UUID, Final]], price_classes: Mapping[str, str]) -> list[_Rated]:
    if not items:
        return []
    times = [uuid_time(key) for key, _ in items]
    classes = [price_classes.get(final.pool, final.pool) for _, final in items]
    book = PriceBook(classes, min(times), max(times))
    rated = []
    for (key, final), at, price_class in zip(items, times, classes, strict=True):
        price = book.at(price_class, at)
        cost = rate(price, final.prompt_tokens, final.cached_tokens, final.completion_tokens) if price else None
        rated.append(_Rated(key, final, price, cost))
    return rated


def _used(final: Final) -> bool:
    """Nothing was computed: settled, but there is nothing to record or charge."""
    return bool(final.prompt_tokens or final.completion_tokens or final.wasted_tokens)


def usage_lines(tenant: str, currency: str, cost: Charge) -> tuple[Line, ...]:
    """The tenant pays the total, each kind of token earns its part. The parts' quantities add up to the usage (I6)."""
    parts = (
        (Kind.INPUT, cost.input, cost.input_tokens),
        (Kind.CACHED, cost.cached, cost.cached_tokens),
        (Kind.OUTPUT, cost.output, cost.output_tokens),
    )
    earned = tuple(Line(ours(kind, currency), amount, tokens, UNIT) for kind, amount, tokens in parts if tokens)
    return (Line(tenant_account(tenant, currency), -cost.total), *earned)


def _posting(x: _Rated) -> Posting:
    assert x.price is not None and x.charge is not None  # noqa: S101
    lines = usage_lines(x.final.tenant, x.price.currency, x.charge)
    return Posting(LedgerTransaction.Kind.USAGE, lines, request_id=x.key, price_version=x.price.version)


def _row(x: _Rated) -> UsageRecord:
    f = x.final
    queued_s, prefill_s, decode_s, parked_s = _timeline(f)
    return UsageRecord(
        request_id=x.key,
        tenant=f.tenant,
        tier=f.tier[:48],
        pool=f.pool[:200],
        engine=f.engine[:200],
        epoch=f.epoch,
        reason=f.reason[:32],
        code=f.code[:64],
        prompt_tokens=f.prompt_tokens,
        cached_tokens=f.cached_tokens,
        completion_tokens=f.completion_tokens,
        wasted_tokens=f.wasted_tokens,
        engine_s=f.engine_s,
        joules=f.joules,
        queued_s=queued_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        parked_s=parked_s or 0.0,
        parks=f.timeline.parks,
        finished_at=datetime.fromtimestamp(f.at_ms / 1000, UTC),
        price_version_id=x.price.version if x.price else None,
        currency=x.price.currency if x.price else "",
        money=x.charge.total if x.charge else Decimal(0),
    )


def _timeline(final: Final) -> tuple[float | None, float | None, float | None, float | None]:
    t = final.timeline
    return t.queued_s, t.prefill_s, t.decode_s, t.parked_s


def _answers(
    finals: Sequence[Final], rated: Mapping[UUID, _Rated], moved: Iterable[ledger.BalanceFacts]
) -> list[Settled]:
    """Each Final's answer, with its tenant's balance as this transaction leaves it."""
    currencies = dict(Tenant.objects.filter(slug__in={f.tenant for f in finals}).values_list("slug", "currency"))
    balances = {(b.account.tenant, b.account.currency): (b.amount, b.sequence) for b in moved}
    still = {slug for slug, currency in currencies.items() if (slug, currency) not in balances}
    if still:
        rows = Balance.objects.filter(account__kind=Kind.TENANT, account__tenant__slug__in=still)
        for slug, currency, amount, sequence in rows.values_list(
            "account__tenant__slug", "account__currency", "amount", "sequence"
        ):
            balances.setdefault((slug, currency), (amount, sequence))
    answers, told = [], set()
    for final in finals:
        key = UUID(final.request)
        x = None if key in told else rated.get(key)
        told.add(key)
        balance = balances.get((final.tenant, currencies.get(final.tenant, "")))
        answers.append(
            Settled(
                request=final.request,
                tenant=final.tenant,
                new=x is not None,
                money=x.charge.total if x and x.charge else None,
                currency=x.price.currency if x and x.price else "",
                balance_nano=nano(balance[0]) if balance else None,
                sequence=balance[1] if balance else 0,
            )
        )
    return answers
