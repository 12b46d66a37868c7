"""Verbs of the business record. Each runs in one transaction with its audit row and tells the data plane on commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Model
from django.utils import timezone

from tenants import announce, audit
from tenants.audit import Actor
from tenants.errors import Refused
from tenants.keys import digest, display_prefix, mint
from tenants.models import ApiKey, Membership, Project, Tenant, Tier, TierTarget, User

__all__ = [
    "IssuedKey",
    "close_project",
    "create_project",
    "create_tenant",
    "create_tier",
    "grant",
    "issue_key",
    "reset_password",
    "revoke",
    "revoke_key",
    "rotate_key",
    "set_status",
    "touch_keys",
    "update_tenant",
    "update_tier",
]

_TENANT_FIELDS = frozenset(
    {"name", "tier", "weight", "max_concurrent", "max_queued", "rate_limits", "billing", "floor", "currency"}
)
_TIER_FIELDS = frozenset({"ttft_ms", "tpot_ms", "max_queued", "weight", "sheddable", "floor_share"})
SCOPES = ("inference", "usage")


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key and its full text, which exists only here (T3)."""

    key: ApiKey
    text: str


@transaction.atomic
def create_tier(actor: Actor, name: str, rank: int, ttft_ms: int, tpot_ms: int, **fields: Any) -> Tier:
    """A new service class and its first targets. Raises ValidationError."""
    _only(fields, _TIER_FIELDS)
    tier = Tier(name=name, rank=rank, ttft_ms=ttft_ms, tpot_ms=tpot_ms, **fields)
    tier.full_clean()
    tier.save(force_insert=True)
    TierTarget.objects.create(tier=tier, since=timezone.now(), ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    audit.record(actor, "tier.create", f"tier:{name}", after=_facts(tier, {"name", "rank", *_TIER_FIELDS}))
    return tier


@transaction.atomic
def update_tier(actor: Actor, tier: Tier, **changes: Any) -> Tier:
    """Change a service class; new targets count for requests admitted from now on."""
    _only(changes, _TIER_FIELDS)
    tier = Tier.objects.select_for_update().get(pk=tier.pk)
    before = _facts(tier, changes)
    _assign(tier, changes)
    if {"ttft_ms", "tpot_ms"} & set(changes):
        TierTarget.objects.create(tier=tier, since=timezone.now(), ttft_ms=tier.ttft_ms, tpot_ms=tier.tpot_ms)
    audit.record(actor, "tier.update", f"tier:{tier.name}", before=before, after=_facts(tier, changes))
    for tenant in Tenant.objects.filter(tier__rank__lte=tier.rank).order_by("pk"):
        announce.changed(tenant)
    return tier


@transaction.atomic
def create_tenant(actor: Actor, slug: str, name: str, tier: Tier, lower: Iterable[Tier] = (), **fields: Any) -> Tenant:
    """A new customer. `lower` are worse tiers that its requests may ask for. Raises ValidationError."""
    _only(fields, _TENANT_FIELDS)
    tenant = Tenant(slug=slug, name=name, tier=tier, **fields)
    tenant.full_clean()
    tenant.save(force_insert=True)
    tenant.lower_tiers.set(_worse(tier, lower))
    after = _facts(tenant, {"slug", "billing", "currency", *fields, "name", "tier"})
    audit.record(actor, "tenant.create", f"tenant:{slug}", tenant=slug, after=after)
    return tenant


@transaction.atomic
def update_tenant(actor: Actor, tenant: Tenant, lower: Iterable[Tier] | None = None, **changes: Any) -> Tenant:
    """Change limits, tier or terms; caches of the data plane learn it through the generation (T4)."""
    _only(changes, _TENANT_FIELDS)
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    before = _facts(tenant, changes)
    _assign(tenant, changes)
    after = _facts(tenant, changes)
    if lower is not None:
        before["lower_tiers"] = list(tenant.lower_tiers.values_list("name", flat=True))
        tenant.lower_tiers.set(_worse(tenant.tier, lower))
        after["lower_tiers"] = list(tenant.lower_tiers.values_list("name", flat=True))
    audit.record(actor, "tenant.update", f"tenant:{tenant.slug}", tenant=tenant.slug, before=before, after=after)
    announce.changed(tenant)
    return tenant


@transaction.atomic
def set_status(actor: Actor, tenant: Tenant, status: Tenant.Status) -> Tenant:
    """Activate, suspend or close. A tenant is never deleted: its records are."""
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    before = {"status": tenant.status}
    _assign(tenant, {"status": status})
    after = {"status": status}
    audit.record(actor, "tenant.status", f"tenant:{tenant.slug}", tenant=tenant.slug, before=before, after=after)
    announce.changed(tenant)
    return tenant


@transaction.atomic
def create_project(actor: Actor, tenant: Tenant, slug: str, name: str) -> Project:
    project = Project(tenant=tenant, slug=slug, name=name)
    project.full_clean()
    project.save(force_insert=True)
    after = {"name": name}
    audit.record(actor, "project.create", f"project:{tenant.slug}/{slug}", tenant=tenant.slug, after=after)
    return project


@transaction.atomic
def close_project(actor: Actor, project: Project) -> None:
    """Its keys stop working; its records stay."""
    project.status = Project.Status.CLOSED
    project.save(update_fields=["status"])
    tenant = project.tenant
    audit.record(actor, "project.close", f"project:{tenant.slug}/{project.slug}", tenant=tenant.slug)
    announce.changed(tenant)


@transaction.atomic
def grant(actor: Actor, user: User, tenant: Tenant, role: Membership.Role) -> Membership:
    """Give a user a role with the tenant, or change it."""
    old = Membership.objects.select_for_update().filter(user=user, tenant=tenant).first()
    before = {"role": old.role} if old else None
    member, _ = Membership.objects.update_or_create(user=user, tenant=tenant, defaults={"role": role})
    target = f"member:{user.get_username()}"
    audit.record(actor, "member.grant", target, tenant=tenant.slug, before=before, after={"role": role})
    return member


@transaction.atomic
def revoke(actor: Actor, member: Membership) -> None:
    """Take the role away."""
    target = f"member:{member.user.get_username()}"
    audit.record(actor, "member.revoke", target, tenant=member.tenant.slug, before={"role": member.role})
    member.delete()


@transaction.atomic
def issue_key(
    actor: Actor,
    project: Project,
    name: str,
    *,
    scopes: Sequence[str] = SCOPES,
    models: Sequence[str] | None = None,
    ip_ranges: Sequence[str] = (),
    expires_at: datetime | None = None,
    rotated_from: ApiKey | None = None,
) -> IssuedKey:
    """A new key. Its text is in the answer and nowhere else."""
    public_id, secret, text = mint()
    key = ApiKey(
        public_id=public_id,
        digest=digest(secret, settings.SLUICE_KEY_PEPPER),
        prefix=display_prefix(public_id),
        name=name,
        project=project,
        scopes=list(scopes),
        allowed_models=None if models is None else list(models),
        ip_ranges=list(ip_ranges),
        expires_at=expires_at,
        rotated_from=rotated_from,
        created_by=actor.user,
    )
    key.full_clean()
    key.save(force_insert=True)
    after = _facts(key, {"name", "scopes", "allowed_models", "ip_ranges", "expires_at"})
    audit.record(actor, "key.issue", f"key:{public_id}", tenant=project.tenant.slug, after=after)
    return IssuedKey(key, text)


@transaction.atomic
def rotate_key(actor: Actor, key: ApiKey, overlap: timedelta = timedelta(days=1)) -> IssuedKey:
    """A successor with the same rights; the old key works for `overlap` more (or until its own, earlier end)."""
    key = ApiKey.objects.select_for_update().select_related("project__tenant").get(pk=key.pk)
    issued = issue_key(
        actor,
        key.project,
        key.name,
        scopes=key.scopes,
        models=key.allowed_models,
        ip_ranges=key.ip_ranges,
        expires_at=key.expires_at,
        rotated_from=key,
    )
    end = timezone.now() + overlap
    before = _facts(key, {"expires_at"})
    _assign(key, {"expires_at": min(end, key.expires_at) if key.expires_at else end})
    tenant, after = key.project.tenant, _facts(key, {"expires_at"})
    audit.record(actor, "key.rotate", f"key:{key.public_id}", tenant=tenant.slug, before=before, after=after)
    announce.changed(tenant)
    return issued


@transaction.atomic
def revoke_key(actor: Actor, key: ApiKey) -> None:
    """The key stops working as soon as the data plane hears of it (at once when Redis is up)."""
    key = ApiKey.objects.select_for_update().select_related("project__tenant").get(pk=key.pk)
    if key.revoked_at is not None:
        return
    key.revoked_at = timezone.now()
    key.save(update_fields=["revoked_at"])
    tenant = key.project.tenant
    audit.record(actor, "key.revoke", f"key:{key.public_id}", tenant=tenant.slug)
    announce.changed(tenant)


def touch_keys(used: Mapping[str, datetime]) -> None:
    """Note when keys (by public id) were last used, to the minute: a fact about them, not a change of them.

    Rows are locked in key order, as every writer of several rows does.
    """
    keys = ApiKey.objects.filter(public_id__in=used).order_by("pk")
    with transaction.atomic():
        for key in keys.select_for_update(skip_locked=True).only("public_id", "last_used_at"):
            at = used[key.public_id]
            if key.last_used_at is None or at - key.last_used_at > timedelta(minutes=1):
                key.last_used_at = at
                key.save(update_fields=["last_used_at"])


@transaction.atomic
def reset_password(actor: Actor, user: User, password: str) -> None:
    """Set a password; its text is not audited, that it changed is."""
    user.set_password(password)
    user.save(update_fields=["password"])
    audit.record(actor, "user.password", f"user:{user.get_username()}")


def _only(given: Iterable[str], allowed: frozenset[str]) -> None:
    unknown = set(given) - allowed
    if unknown:
        raise TypeError(f"not changeable here: {', '.join(sorted(unknown))}")


def _worse(tier: Tier, lower: Iterable[Tier]) -> list[Tier]:
    tiers = list(lower)
    if any(t.rank <= tier.rank for t in tiers):
        raise Refused("a tenant may only ask for tiers that are worse than its own")
    return tiers


def _assign(row: Model, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(row, name, value)
    row.full_clean()
    row.save(update_fields=list(changes))


def _facts(row: Model, names: Iterable[str]) -> dict[str, Any]:
    """The named fields as the audit trail shows them."""
    facts: dict[str, Any] = {}
    for name in sorted(names):
        value = getattr(row, name)
        facts[name] = str(value) if isinstance(value, Model | Decimal) else value
    return facts
