"""What the data plane knows of a key's bearer: plain frozen facts, cached there until the generation changes."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from tenants.models import ApiKey, Project, Tenant, Tier
from tenants.threads import off_loop

__all__ = ["Principal", "TierFacts", "find_principal", "load_principal"]

NANO = Decimal(10) ** 9


@dataclass(frozen=True, slots=True)
class TierFacts:
    """A service class. Rank 0 is served first; targets in milliseconds."""

    name: str
    rank: int
    ttft_ms: int
    tpot_ms: int
    max_queued: int
    weight: float
    sheddable: bool


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking and what they may have. `tiers` are best first, the first is the default. -1: no limit."""

    tenant: str
    tenant_name: str
    project: str
    key_id: str
    generation: int
    tiers: tuple[TierFacts, ...]
    models: tuple[str, ...] | None
    scopes: frozenset[str]
    ip_ranges: tuple[str, ...]
    max_concurrent: int
    max_queued: int
    limits: tuple[tuple[str, int, int], ...]
    """(name, capacity, refill per minute)."""
    weight: float
    floor_nano: int | None
    """The balance may not fall below this many nano-units; None: postpaid."""
    currency: str
    expires_ms: int | None
    active: bool
    """False: revoked key, closed project, suspended or closed tenant."""
    salt: str
    other_tiers: tuple[str, ...] = ()
    """Names of the tiers that exist and are not its own: to ask for one is forbidden, for any other name a mistake."""


def load_principal(public_id: str) -> tuple[Principal, bytes] | None:
    """The principal of a key and the stored HMAC of its secret, or None when there is no such key."""
    key = ApiKey.objects.select_related("project__tenant__tier").filter(public_id=public_id).first()
    if key is None:
        return None
    return _principal(key), bytes(key.digest)


find_principal = off_loop(load_principal)


def _principal(key: ApiKey) -> Principal:
    project, tenant = key.project, key.project.tenant
    lower = tenant.lower_tiers.filter(rank__gt=tenant.tier.rank).order_by("rank")
    tiers = tuple(_tier(t) for t in (tenant.tier, *lower))
    own = [t.name for t in tiers]
    return Principal(
        tenant=tenant.slug,
        tenant_name=tenant.name,
        project=project.slug,
        key_id=key.public_id,
        generation=tenant.generation,
        tiers=tiers,
        models=None if key.allowed_models is None else tuple(key.allowed_models),
        scopes=frozenset(key.scopes),
        ip_ranges=tuple(key.ip_ranges),
        max_concurrent=tenant.max_concurrent,
        max_queued=tenant.max_queued,
        limits=tuple((x["name"], x["capacity"], x["per_minute"]) for x in tenant.rate_limits),
        weight=tenant.weight,
        floor_nano=_floor_nano(tenant),
        currency=tenant.currency,
        expires_ms=None if key.expires_at is None else int(key.expires_at.timestamp() * 1000),
        active=_active(key, project, tenant),
        salt=tenant.salt,
        other_tiers=tuple(Tier.objects.exclude(name__in=own).order_by("rank").values_list("name", flat=True)),
    )


def _tier(tier: Tier) -> TierFacts:
    return TierFacts(tier.name, tier.rank, tier.ttft_ms, tier.tpot_ms, tier.max_queued, tier.weight, tier.sheddable)


def _floor_nano(tenant: Tenant) -> int | None:
    if tenant.billing == Tenant.Billing.POSTPAID:
        return None
    return int(((tenant.floor or Decimal(0)) * NANO).to_integral_value(ROUND_CEILING))


def _active(key: ApiKey, project: Project, tenant: Tenant) -> bool:
    return key.revoked_at is None and project.status == Project.Status.ACTIVE and tenant.status == Tenant.Status.ACTIVE
