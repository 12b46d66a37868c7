"""The demonstration record: tiers, price book, four tenants with a key each and an administrator. Idempotent."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from tenants import audit, services
from tenants.audit import Actor
from tenants.billing import services as billing
from tenants.billing.models import Price
from tenants.models import ApiKey, Project, Tenant, Tier, User

__all__ = ["seed", "traces"]

ACTOR = Actor("seed_demo")
TIERS: dict[str, dict[str, Any]] = {
    # Targets that a small model on a few CPU cores can keep.
    "interactive": {
        "rank": 0,
        "ttft_ms": 2_000,
        "tpot_ms": 150,
        "max_queued": 256,
        "weight": 4.0,
        "floor_share": "0.1",
    },
    "standard": {"rank": 1, "ttft_ms": 8_000, "tpot_ms": 300, "max_queued": 512, "weight": 2.0, "floor_share": "0.1"},
    "batch": {
        "rank": 2,
        "ttft_ms": 60_000,
        "tpot_ms": 1_000,
        "max_queued": 2048,
        "weight": 1.0,
        "floor_share": "0.05",
        "sheddable": True,
    },
}
TENANTS = {"alpha": "interactive", "beta": "standard", "delta": "standard", "gamma": "batch"}
# Nano-dollars per million tokens: input $0.10, cached $0.025, output $0.40 and half of it for everything unlisted.
# An embedding has no output, and each text is computed anew.
PRICES = {
    "smollm2-135m": (100_000_000, 25_000_000, 400_000_000),
    "all-minilm-l6-v2": (20_000_000, 20_000_000, 0),
    "default": (50_000_000, 12_500_000, 200_000_000),
}
ADMIN = "admin"


def seed(rotate: bool = False) -> dict[str, Any]:
    """Make what is missing; the answer holds each secret that was made, null for one that existed."""
    tiers = {name: _tier(name, dict(facts)) for name, facts in TIERS.items()}
    for price_class, rates in PRICES.items():
        _price(price_class, *rates)
    tenants = {slug: {"tier": tier, "key": _tenant_key(slug, tiers[tier], rotate)} for slug, tier in TENANTS.items()}
    return {"admin": _admin(rotate), "tenants": tenants}


def traces() -> list[QuerySet[Any]]:
    """What `seed` would make if it were missing, in a fixed order."""
    keys = ApiKey.objects.filter(name="demo", revoked_at=None, project__slug="default")
    return [
        Tier.objects.filter(name__in=TIERS).order_by("name").values_list("name"),
        Price.objects.filter(price_class__in=PRICES).order_by("price_class").values_list("price_class").distinct(),
        keys.filter(project__tenant__slug__in=TENANTS)
        .order_by("project__tenant__slug")
        .values_list("project__tenant__slug"),
        User.objects.filter(username=ADMIN).values_list("username"),
    ]


def _tier(name: str, facts: dict[str, Any]) -> Tier:
    facts["floor_share"] = Decimal(facts["floor_share"])
    return Tier.objects.filter(name=name).first() or services.create_tier(ACTOR, name, **facts)


def _price(price_class: str, fresh: int, cached: int, output: int) -> None:
    if Price.objects.filter(price_class=price_class).exists():
        return
    billing.publish(
        ACTOR,
        billing.create_price(ACTOR, price_class),
        input_nano_per_mtok=fresh,
        cached_nano_per_mtok=cached,
        output_nano_per_mtok=output,
        valid_from=datetime(2020, 1, 1, tzinfo=UTC),
    )


def _tenant_key(slug: str, tier: Tier, rotate: bool) -> str | None:
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        lower = Tier.objects.filter(rank__gt=tier.rank)
        tenant = services.create_tenant(ACTOR, slug, slug.capitalize(), tier, lower)
    project = Project.objects.filter(tenant=tenant, slug="default").first()
    if project is None:
        project = services.create_project(ACTOR, tenant, "default", "Default")
    old = ApiKey.objects.filter(project=project, name="demo", revoked_at=None).order_by("-id")
    if old.exists() and not rotate:
        return None
    issued = services.issue_key(ACTOR, project, "demo", rotated_from=old.first())
    for key in old.exclude(pk=issued.key.pk):
        services.revoke_key(ACTOR, key)
    return issued.text


def _admin(rotate: bool) -> dict[str, str] | None:
    user = User.objects.filter(username=ADMIN).first()
    if user is not None and not rotate:
        return None
    password = secrets.token_urlsafe(18)
    if user is None:
        User.objects.create_superuser(ADMIN, password=password, date_joined=timezone.now())
        audit.record(ACTOR, "user.create", f"user:{ADMIN}")
    else:
        services.reset_password(ACTOR, user, password)
    return {"username": ADMIN, "password": password}
