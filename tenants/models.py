"""Rows of the business record. They are changed through `tenants.services` only, which writes the audit trail."""

from __future__ import annotations

import secrets

from django.contrib.auth.models import AbstractUser
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q

__all__ = ["ApiKey", "AuditEvent", "Membership", "Project", "Tenant", "Tier", "TierTarget", "User"]

_slug = RegexValidator(r"^[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$", "Lower-case letters, digits and inner hyphens.")


def _salt() -> str:
    return secrets.token_hex(16)


class User(AbstractUser):
    """A person who signs in to the console. Operators have `is_staff`; others see tenants through `Membership`."""


class Tier(models.Model):
    """A service class: what latency is promised, how much may wait, and what share is guaranteed under load."""

    name = models.CharField(max_length=48, unique=True, validators=[_slug])
    rank = models.PositiveSmallIntegerField(unique=True, help_text="0 is served first.")
    ttft_ms = models.PositiveIntegerField(help_text="Target of the time to first token.")
    tpot_ms = models.PositiveIntegerField(help_text="Target of the mean time per output token after the first.")
    max_queued = models.PositiveIntegerField(default=256, help_text="Requests of the tier that may wait in one pool.")
    weight = models.FloatField(default=1.0, validators=[MinValueValidator(0.001)])
    sheddable = models.BooleanField(default=False, help_text="Refused early under overload.")
    floor_share = models.DecimalField(max_digits=4, decimal_places=3, default=0, help_text="Guaranteed share, 0 to 1.")

    class Meta:
        ordering = ["rank"]
        constraints = [
            models.CheckConstraint(condition=Q(floor_share__gte=0, floor_share__lte=1), name="tier_floor_share"),
            models.CheckConstraint(condition=Q(ttft_ms__gt=0, tpot_ms__gt=0, weight__gt=0), name="tier_positive"),
        ]

    def __str__(self) -> str:
        return self.name


class TierTarget(models.Model):
    """Latency targets of a tier from `since` on: a request is judged by those in force when it was admitted."""

    tier = models.ForeignKey(Tier, on_delete=models.CASCADE, related_name="targets")
    since = models.DateTimeField()
    ttft_ms = models.PositiveIntegerField()
    tpot_ms = models.PositiveIntegerField()

    class Meta:
        ordering = ["tier", "since"]
        constraints = [models.UniqueConstraint(fields=["tier", "since"], name="tier_target_since")]


MAX_RATE = 10**12


class Tenant(models.Model):
    """A customer. `slug` is its identity on the wire, in keys of Redis and in every usage row, and never changes."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"
        CLOSED = "closed"

    class Billing(models.TextChoices):
        PREPAID = "prepaid"
        POSTPAID = "postpaid"

    slug = models.CharField(max_length=48, unique=True, validators=[_slug])
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=16, choices=Status, default=Status.ACTIVE)
    tier = models.ForeignKey(Tier, on_delete=models.PROTECT, related_name="tenants")
    lower_tiers = models.ManyToManyField(Tier, blank=True, related_name="+", help_text="Worse tiers it may ask for.")
    weight = models.FloatField(default=1.0, validators=[MinValueValidator(0.001)])
    max_concurrent = models.IntegerField(default=-1, validators=[MinValueValidator(-1)], help_text="-1: unlimited.")
    max_queued = models.IntegerField(default=-1, validators=[MinValueValidator(-1)], help_text="-1: unlimited.")
    rate_limits = models.JSONField(default=list, blank=True, help_text='[{"name", "capacity", "per_minute"}]')
    billing = models.CharField(max_length=16, choices=Billing, default=Billing.POSTPAID)
    floor = models.DecimalField(
        max_digits=20, decimal_places=9, null=True, blank=True, help_text="Prepaid balance may not fall below; <= 0."
    )
    currency = models.CharField(max_length=3, default="USD", validators=[RegexValidator(r"^[A-Z]{3}$")])
    generation = models.PositiveBigIntegerField(default=1, editable=False)
    salt = models.CharField(max_length=32, default=_salt, editable=False, help_text="Keeps its prefix cache apart.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["slug"]
        constraints = [
            models.CheckConstraint(condition=Q(weight__gt=0), name="tenant_weight"),
            models.CheckConstraint(condition=Q(max_concurrent__gte=-1, max_queued__gte=-1), name="tenant_limits"),
            models.CheckConstraint(condition=Q(floor__isnull=True) | Q(floor__lte=0), name="tenant_floor"),
        ]

    def __str__(self) -> str:
        return self.slug

    def clean(self) -> None:
        for limit in self.rate_limits:
            if not isinstance(limit, dict) or set(limit) != {"name", "capacity", "per_minute"}:
                raise ValidationError({"rate_limits": "Each limit has exactly name, capacity and per_minute."})
            if limit["name"] not in {"requests", "tokens"}:
                raise ValidationError({"rate_limits": "A limit's name is requests or tokens."})
            # `type`: True is an int. The bound keeps the arithmetic of Redis, whose numbers are doubles, exact.
            if not all(type(limit[k]) is int and 0 < limit[k] <= MAX_RATE for k in ("capacity", "per_minute")):
                raise ValidationError({"rate_limits": f"capacity and per_minute are integers from 1 to {MAX_RATE}."})


class Project(models.Model):
    """A part of a tenant that keys and reports are grouped by."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        CLOSED = "closed"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="projects")
    slug = models.CharField(max_length=48, validators=[_slug])
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=16, choices=Status, default=Status.ACTIVE)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["tenant", "slug"]
        constraints = [models.UniqueConstraint(fields=["tenant", "slug"], name="project_slug")]

    def __str__(self) -> str:
        return f"{self.tenant_id}/{self.slug}"


class Membership(models.Model):
    """What a user may do with a tenant."""

    class Role(models.TextChoices):
        OWNER = "owner"
        ADMIN = "admin"
        FINANCE = "finance"
        VIEWER = "viewer"

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role, default=Role.VIEWER)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "tenant"], name="membership_once")]


class ApiKey(models.Model):
    """A key of a project. Only the HMAC of its secret is kept; `prefix` is what the console shows."""

    public_id = models.CharField(max_length=16, unique=True)
    digest = models.BinaryField(max_length=32)
    prefix = models.CharField(max_length=16)
    name = models.CharField(max_length=200)
    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="keys")
    scopes = models.JSONField(default=list, help_text="What it may call, for example inference or usage.")
    allowed_models = models.JSONField(null=True, blank=True, help_text="Names of models; null: all.")
    ip_ranges = models.JSONField(default=list, blank=True, help_text="CIDR ranges; empty: any address.")
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    rotated_from = models.ForeignKey("self", on_delete=models.PROTECT, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, blank=True, related_name="+")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=~Q(rotated_from=F("id")), name="key_not_rotated_from_itself"),
        ]

    def __str__(self) -> str:
        return f"{self.prefix}…"


class AuditEvent(models.Model):
    """One change: who, what, before and after. `hash` covers the row and the hash before it (see `tenants.audit`)."""

    position = models.PositiveBigIntegerField(unique=True, help_text="Without gaps: a missing one is tampering.")
    at = models.DateTimeField()
    actor = models.ForeignKey(User, on_delete=models.PROTECT, null=True, blank=True, related_name="+")
    actor_label = models.CharField(max_length=200)
    tenant = models.CharField(max_length=48, blank=True, db_index=True, help_text="Slug; empty: the installation.")
    action = models.CharField(max_length=64)
    target = models.CharField(max_length=200)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    previous = models.BinaryField(max_length=32)
    hash = models.BinaryField(max_length=32)

    class Meta:
        ordering = ["-position"]
