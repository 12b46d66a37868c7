"""Reads of the business record, each limited to what the asking user may see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from tenants.models import ApiKey, AuditEvent, Membership, Project, Tenant, Tier, TierTarget, User

__all__ = [
    "TargetHistory",
    "api_keys",
    "audit_events",
    "may",
    "projects",
    "tenants_for",
    "tiers",
    "visible_slugs",
]

Role = Membership.Role
MANAGES: frozenset[str] = frozenset({Role.OWNER, Role.ADMIN})
SEES_MONEY: frozenset[str] = frozenset({Role.OWNER, Role.ADMIN, Role.FINANCE})
SEES: frozenset[str] = frozenset(Role.values)


def tenants_for(user: User, roles: frozenset[str] = SEES) -> QuerySet[Tenant]:
    """Tenants in which the user has one of the roles; all of them for an operator."""
    tenants = Tenant.objects.select_related("tier")
    if user.is_active and user.is_staff:
        return tenants
    if not user.is_active:
        return tenants.none()
    return tenants.filter(memberships__user=user, memberships__role__in=roles)


def visible_slugs(user: User) -> frozenset[str]:
    """Slugs of the tenants that the user may look at."""
    return frozenset(tenants_for(user).values_list("slug", flat=True))


def may(user: User, tenant: Tenant, roles: frozenset[str]) -> bool:
    """Whether the user has one of the roles with the tenant."""
    return tenants_for(user, roles).filter(pk=tenant.pk).exists()


def projects(user: User) -> QuerySet[Project]:
    return Project.objects.select_related("tenant").filter(tenant__in=tenants_for(user))


def api_keys(user: User) -> QuerySet[ApiKey]:
    return ApiKey.objects.select_related("project__tenant").filter(project__tenant__in=tenants_for(user))


def audit_events(user: User) -> QuerySet[AuditEvent]:
    """Events of the tenants the user manages; an operator also sees those of the installation."""
    if user.is_active and user.is_staff:
        return AuditEvent.objects.all()
    return AuditEvent.objects.filter(tenant__in=tenants_for(user, MANAGES).values("slug"))


def tiers() -> list[Tier]:
    """All tiers, best first."""
    return list(Tier.objects.order_by("rank"))


@dataclass(frozen=True, slots=True)
class TargetHistory:
    """Latency targets of some tiers over time."""

    by_tier: dict[str, list[tuple[datetime, int, int]]]

    @classmethod
    def load(cls, names: Iterable[str]) -> TargetHistory:
        by_tier: dict[str, list[tuple[datetime, int, int]]] = {}
        rows = TierTarget.objects.filter(tier__name__in=set(names)).order_by("since")
        for name, since, ttft_ms, tpot_ms in rows.values_list("tier__name", "since", "ttft_ms", "tpot_ms"):
            by_tier.setdefault(name, []).append((since, ttft_ms, tpot_ms))
        return cls(by_tier)

    def at(self, tier: str, at: datetime) -> tuple[int, int] | None:
        """(TTFT, TPOT) targets in ms in force at a time; before the first, the first. None: no such tier."""
        history = self.by_tier.get(tier)
        if not history:
            return None
        in_force = [target for target in history if target[0] <= at] or history[:1]
        return in_force[-1][1:]
