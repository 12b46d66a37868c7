"""Rows of money. Triggers in the migrations keep them as they were written."""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models
from django.db.models import F, Q

from tenants.models import Tenant

__all__ = [
    "Balance",
    "LedgerAccount",
    "LedgerEntry",
    "LedgerTransaction",
    "Price",
    "PriceVersion",
    "ServedModel",
    "Settlement",
    "UsageRecord",
]

_currency = RegexValidator(r"^[A-Z]{3}$")
DIGITS, PLACES = 38, 15
"""One nano-unit per million tokens for one token is 10^-15: amounts are exact until an invoice line rounds them."""


class Price(models.Model):
    """A line of the price book: what a class of models costs. A model whose class has none is priced as `default`."""

    price_class = models.CharField(max_length=128, unique=True)
    currency = models.CharField(max_length=3, default="USD", validators=[_currency])

    def __str__(self) -> str:
        return self.price_class


class PriceVersion(models.Model):
    """Rates from `valid_from` until `valid_to` (None: open), nano-units per million tokens. Published, it stays."""

    price = models.ForeignKey(Price, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField()
    input_nano_per_mtok = models.BigIntegerField()
    cached_nano_per_mtok = models.BigIntegerField()
    output_nano_per_mtok = models.BigIntegerField()
    valid_from = models.DateTimeField()
    valid_to = models.DateTimeField(null=True, blank=True)
    published_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["price", "number"], name="price_version_number"),
            models.CheckConstraint(
                condition=Q(input_nano_per_mtok__gte=0, cached_nano_per_mtok__gte=0, output_nano_per_mtok__gte=0),
                name="price_version_not_negative",
            ),
            models.CheckConstraint(
                condition=Q(valid_to__isnull=True) | Q(valid_to__gt=F("valid_from")), name="price_version_interval"
            ),
        ]


class LedgerAccount(models.Model):
    """An account of one kind, tenant (or none: ours) and currency. A tenant's account holds what we owe it."""

    class Kind(models.TextChoices):
        TENANT = "tenant"
        INPUT = "revenue_input"
        CACHED = "revenue_cached"
        OUTPUT = "revenue_output"
        CASH = "cash"
        ROUNDING = "rounding"

    kind = models.CharField(max_length=32, choices=Kind)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, null=True, blank=True, related_name="accounts")
    currency = models.CharField(max_length=3, validators=[_currency])

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "tenant", "currency"], name="ledger_account_once", nulls_distinct=False
            ),
            models.CheckConstraint(
                condition=Q(kind="tenant", tenant__isnull=False) | ~Q(kind="tenant"), name="ledger_account_tenant"
            ),
        ]


class Balance(models.Model):
    """Sum of a tenant account's entries; the only row here that changes. `sequence` grows with every change."""

    account = models.OneToOneField(LedgerAccount, on_delete=models.PROTECT, primary_key=True, related_name="balance")
    amount = models.DecimalField(max_digits=DIGITS, decimal_places=PLACES, default=0)
    sequence = models.BigIntegerField(default=0)


class LedgerTransaction(models.Model):
    """A set of entries that sum to zero, and why they were made."""

    class Kind(models.TextChoices):
        USAGE = "usage"
        TOP_UP = "top_up"
        REVERSAL = "reversal"
        ADJUSTMENT = "adjustment"
        RESIDUE = "residue"

    kind = models.CharField(max_length=16, choices=Kind)
    request_id = models.UUIDField(null=True, blank=True)
    reverses = models.OneToOneField("self", on_delete=models.PROTECT, null=True, blank=True, related_name="reversal")
    price_version = models.ForeignKey(PriceVersion, on_delete=models.PROTECT, null=True, blank=True, related_name="+")
    note = models.CharField(max_length=500, blank=True)
    at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["request_id"], name="ledger_by_request", condition=Q(request_id__isnull=False))]
        constraints = [
            models.UniqueConstraint(fields=["request_id"], condition=Q(kind="usage"), name="ledger_usage_once"),
            models.CheckConstraint(
                condition=Q(kind="reversal", reverses__isnull=False) | ~Q(kind="reversal") & Q(reverses__isnull=True),
                name="ledger_reversal_names_what",
            ),
        ]


class LedgerEntry(models.Model):
    """One side of a transaction. Positive: the account gains. `quantity` (in `unit`) is what the amount was made of."""

    transaction = models.ForeignKey(LedgerTransaction, on_delete=models.PROTECT, related_name="entries")
    account = models.ForeignKey(LedgerAccount, on_delete=models.PROTECT, related_name="entries")
    amount = models.DecimalField(max_digits=DIGITS, decimal_places=PLACES)
    quantity = models.BigIntegerField(null=True, blank=True)
    unit = models.CharField(max_length=32, blank=True)


class Settlement(models.Model):
    """A request was settled. Not partitioned: its key alone decides, also across a month end (I3)."""

    request_id = models.UUIDField(primary_key=True)
    settled_at = models.DateTimeField()


class UsageRecord(models.Model):
    """What one request used and cost. Partitioned by month on its UUIDv7 key, which holds the admission time."""

    request_id = models.UUIDField(primary_key=True)
    tenant = models.CharField(max_length=48)
    tier = models.CharField(max_length=48)
    pool = models.CharField(max_length=200)
    engine = models.CharField(max_length=200)
    epoch = models.IntegerField()
    reason = models.CharField(max_length=32)
    code = models.CharField(max_length=64, blank=True)
    prompt_tokens = models.BigIntegerField()
    cached_tokens = models.BigIntegerField()
    completion_tokens = models.BigIntegerField()
    wasted_tokens = models.BigIntegerField()
    engine_s = models.FloatField()
    joules = models.FloatField()
    queued_s = models.FloatField(null=True)
    prefill_s = models.FloatField(null=True)
    decode_s = models.FloatField(null=True)
    parked_s = models.FloatField()
    parks = models.IntegerField()
    finished_at = models.DateTimeField()
    price_version = models.ForeignKey(PriceVersion, on_delete=models.PROTECT, null=True, related_name="+")
    currency = models.CharField(max_length=3)
    money = models.DecimalField(max_digits=DIGITS, decimal_places=PLACES)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "-request_id"], name="usage_by_tenant"),
            models.Index(fields=["finished_at"], name="usage_by_finish"),
        ]


class ServedModel(models.Model):
    """Which price class a pool's model has, as its card last said: the record survives a loss of Redis."""

    pool = models.CharField(max_length=200, primary_key=True)
    price_class = models.CharField(max_length=128)
    seen_at = models.DateTimeField()
