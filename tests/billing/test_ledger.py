"""I1, I2: entries balance, history stands; many writers over the same tenants give exact totals without a deadlock."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

from engine.protocol.messages import Final
from tenants.billing import ledger, services
from tenants.billing.corrections import rerate, reverse
from tenants.billing.ledger import Line, Posting, Unbalanced, ours, tenant_account
from tenants.billing.models import (
    Balance,
    LedgerAccount,
    LedgerEntry,
    LedgerTransaction,
    PriceVersion,
    UsageRecord,
)
from tenants.billing.rating import PriceFacts, charge
from tenants.billing.reconcile import reconcile
from tenants.billing.selectors import balance, load_balance_nano
from tenants.billing.settle import settle
from tenants.models import Tenant
from tests.billing.build import ACTOR, COST, final, in_threads, price, request_id, tenant

Kind = LedgerAccount.Kind


def lines(*amounts: str) -> tuple[Line, ...]:
    accounts = [tenant_account("acme", "USD"), ours(Kind.CASH, "USD"), ours(Kind.ROUNDING, "USD")]
    return tuple(Line(account, Decimal(x)) for account, x in zip(accounts, amounts, strict=False))


@pytest.mark.django_db
@pytest.mark.parametrize("amounts", [("1",), ("1", "-2"), ("1", "-0.999999999999999"), ("1", "-1", "0.5"), ()])
def test_i1_what_does_not_sum_to_zero_is_not_posted(amounts: tuple[str, ...]) -> None:
    tenant()
    with pytest.raises(Unbalanced):
        ledger.post(Posting("top_up", lines(*amounts)))
    assert not LedgerTransaction.objects.exists()


@pytest.mark.django_db
def test_i1_currencies_balance_each_for_itself() -> None:
    tenant()
    mixed = (Line(tenant_account("acme", "USD"), Decimal(1)), Line(ours(Kind.CASH, "EUR"), Decimal(-1)))
    with pytest.raises(Unbalanced):
        ledger.post(Posting("top_up", mixed))


@pytest.mark.django_db
def test_i1_the_database_refuses_too_at_commit() -> None:
    tenant()
    row = ledger.post(Posting("top_up", lines("1", "-1")))
    LedgerEntry.objects.create(transaction=row, account=row.entries.all()[0].account, amount=Decimal("0.1"))
    with pytest.raises(IntegrityError, match="is off by"), connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


@pytest.mark.django_db
@pytest.mark.parametrize("table", ["ledgerentry", "ledgertransaction", "ledgeraccount", "settlement", "usagerecord"])
def test_i2_history_is_append_only(table: str) -> None:
    tenant(), price()
    settle([final()], {})
    column = {"ledgerentry": "unit", "ledgertransaction": "note", "ledgeraccount": "currency"}.get(table, "request_id")
    for sql in (f"UPDATE billing_{table} SET {column} = {column}", f"DELETE FROM billing_{table}"):  # noqa: S608
        with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(sql)
    with connection.cursor() as cursor:  # partitions are no way around
        cursor.execute("SELECT tableoid::regclass::text FROM billing_usagerecord")
        partition = cursor.fetchone()[0]
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {partition}")  # noqa: S608


@pytest.mark.django_db
def test_i2_a_wrong_price_is_corrected_by_new_entries_and_history_stays() -> None:
    tenant(), price()
    request = request_id()
    settle([final(request)], {})
    wrong = LedgerTransaction.objects.get(kind="usage")
    right = PriceFacts(price("right").pk, "USD", 1_000_000, 1_000_000, 1_000_000)
    row = rerate(ACTOR, UsageRecord.objects.get().pk, right, "the sales sheet had a typo")
    corrected = charge(right, 100, 20, 30)
    assert balance("acme", "USD")[0] == -corrected != -COST
    undone = LedgerTransaction.objects.get(kind="reversal")
    assert undone.reverses == wrong and undone.note == row.note == "the sales sheet had a typo"
    assert UsageRecord.objects.get().money == COST and LedgerTransaction.objects.count() == 3
    assert reconcile() == []
    with pytest.raises(IntegrityError), transaction.atomic():  # the same mistake is undone once
        reverse(ACTOR, wrong, "again")
    rerate(ACTOR, UsageRecord.objects.get().pk, right, "twice is the same")
    assert balance("acme", "USD")[0] == -corrected


@pytest.mark.django_db
def test_a_top_up_raises_the_balance_and_its_sequence() -> None:
    acme = tenant(billing="prepaid", floor=0)
    assert load_balance_nano("acme") == (0, 0)
    services.top_up(ACTOR, acme, Decimal("12.5"), "wire 17")
    services.top_up(ACTOR, acme, Decimal("0.000000001"), "a nano")
    assert load_balance_nano("acme") == (12_500_000_001, 2)
    with pytest.raises(ValueError, match="positive"):
        services.top_up(ACTOR, acme, Decimal(-1), "no")


@pytest.mark.django_db(transaction=True)
def test_sixteen_threads_over_the_same_five_tenants_no_deadlock_and_exact_totals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "tenants.billing.retry")
    slugs = [f"t{n}" for n in range(5)]
    for slug in slugs:
        tenant(slug)
    price()
    batches = []
    for seed in range(16):
        draw = random.Random(seed)
        mixed = [slugs[n % 5] for n in range(40)]
        draw.shuffle(mixed)
        batches.append([final(tenant=slug, completion_tokens=draw.randrange(200)) for slug in mixed])

    def work(batch: list) -> None:
        for start in range(0, len(batch), 8):
            settle(batch[start : start + 8], {})

    def pay(number: int) -> None:
        for _ in range(5):
            for slug in slugs if number % 2 else reversed(slugs):
                services.top_up(ACTOR, Tenant.objects.get(slug=slug), Decimal("0.1"), "instalment")

    settling = [lambda batch=batch: work(batch) for batch in batches]
    in_threads([*settling, *(lambda n=n: pay(n) for n in range(2))])
    assert "tried again" not in caplog.text  # not one deadlock to break
    everything = [f for batch in batches for f in batch]
    rates = PriceFacts(1, "USD", 100_000_000, 25_000_000, 400_000_000)
    for slug in slugs:
        mine = [f for f in everything if f.tenant == slug]
        expected = sum(charge(rates, f.prompt_tokens, f.cached_tokens, f.completion_tokens) for f in mine)
        assert balance(slug, "USD")[0] == 1 - expected
        assert sum(UsageRecord.objects.filter(tenant=slug).values_list("money", flat=True)) == expected
    assert UsageRecord.objects.count() == len(everything) == 640
    assert Balance.objects.count() == 5
    assert reconcile() == []


@pytest.mark.django_db
@pytest.mark.parametrize("seed", range(5))
def test_i1_to_i6_hold_after_any_history(seed: int) -> None:
    """Settling, delivering again, paying and correcting in any order: the books agree with a plain sum."""
    draw, slugs = random.Random(seed), ["acme", "umbrella"]
    tenants = [tenant(slug) for slug in slugs]
    version = price()
    prices = [_facts(version), _facts(price("other", output_nano_per_mtok=1, cached_nano_per_mtok=0))]
    sent: list[Final] = []
    owed: dict[str, tuple[str, Decimal]] = {}
    paid = dict.fromkeys(slugs, Decimal(0))
    for _ in range(60):
        match draw.choice(["settle", "settle", "again", "pay", "rerate"]):
            case "settle":
                batch = [_any_final(draw, slugs) for _ in range(draw.randrange(1, 9))]
                for f in batch:
                    cost = charge(prices[0], f.prompt_tokens, f.cached_tokens, f.completion_tokens)
                    owed[f.request] = (f.tenant, cost)
                sent += batch
                settle(batch, {})
            case "again" if sent:
                assert not any(x.new for x in settle(draw.choices(sent, k=5), {}))
            case "pay":
                amount, who = Decimal(draw.randrange(1, 10**9)).scaleb(-9), draw.randrange(2)
                services.top_up(ACTOR, tenants[who], amount, "wire")
                paid[slugs[who]] += amount
            case "rerate" if sent:
                f, facts = draw.choice(sent), draw.choice(prices)
                if f.prompt_tokens + f.completion_tokens + f.wasted_tokens:
                    rerate(ACTOR, UsageRecord.objects.get(request_id=f.request).pk, facts, "as agreed")
                    cost = charge(facts, f.prompt_tokens, f.cached_tokens, f.completion_tokens)
                    owed[f.request] = (f.tenant, cost)
    assert reconcile() == []
    for slug in slugs:
        assert balance(slug, "USD")[0] == paid[slug] - sum(cost for who, cost in owed.values() if who == slug)


def _facts(version: PriceVersion) -> PriceFacts:
    v = version
    return PriceFacts(v.pk, "USD", v.input_nano_per_mtok, v.cached_nano_per_mtok, v.output_nano_per_mtok)


def _any_final(draw: random.Random, slugs: list[str]) -> Final:
    prompt = draw.choice([0, draw.randrange(5000)])
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "cached_tokens": draw.randint(0, prompt),
        "completion_tokens": draw.choice([0, draw.randrange(900)]),
        "wasted_tokens": draw.choice([0, 0, draw.randrange(50)]),
    }
    return final(tenant=draw.choice(slugs), reason=draw.choice(["stop", "length", "abort", "error", "lost"]), **counts)
