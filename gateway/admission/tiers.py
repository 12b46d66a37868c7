"""Which tier a request runs in: from the server's record, lower on request, never higher (A3)."""

from __future__ import annotations

from gateway.errors import ApiError
from tenants.principals import Principal, TierFacts

__all__ = ["choose_tier"]

_DEFAULT = {"auto", "default", "priority", "scale"}
"""OpenAI's names that here mean the best tier the key has: it can't be raised, and clients send these unasked."""


def choose_tier(principal: Principal, service_tier: str | None) -> TierFacts:
    """The tier named by `service_tier`: one of the principal's own, or one of OpenAI's words ("flex": the lowest)."""
    if not principal.tiers:
        raise ApiError("tier_not_allowed", "This API key has no service tier.", param="service_tier")
    if service_tier is None:
        return principal.tiers[0]
    for tier in principal.tiers:
        if tier.name == service_tier:
            return tier
    if service_tier in _DEFAULT:
        return principal.tiers[0]
    if service_tier == "flex":
        return principal.tiers[-1]
    allowed = ", ".join(f"'{t.name}'" for t in principal.tiers)
    if service_tier not in principal.other_tiers:
        words = ", ".join(f"'{word}'" for word in ("auto", "default", "flex", "priority"))
        message = f"Invalid value: '{service_tier[:64]}'. Supported values are: {words}, {allowed}."
        raise ApiError("invalid_value", message, param="service_tier")
    raise ApiError(
        "tier_not_allowed",
        f"This API key may not use the service tier asked for; it may use {allowed}.",
        param="service_tier",
    )
