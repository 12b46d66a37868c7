"""Tenants and keys for the data plane's tests: `python -m tests.seed` prints the keys by name as one JSON line."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from typing import Any

import django

django.setup()

from django.db import transaction  # noqa: E402
from django.utils import timezone  # noqa: E402

from tenants import services  # noqa: E402
from tenants.audit import Actor  # noqa: E402
from tenants.demo import seed  # noqa: E402
from tenants.models import Project, Tenant, Tier  # noqa: E402

ACTOR = Actor("tests")
SPECIAL: dict[str, dict[str, Any]] = {
    "two-at-once": {"max_concurrent": 2},
    "few-waiting": {"max_queued": 3},
    "three-a-minute": {"rate_limits": [{"name": "requests", "capacity": 3, "per_minute": 3}]},
    "told-to-wait": {"rate_limits": [{"name": "requests", "capacity": 3, "per_minute": 3}]},
    "few-tokens": {"rate_limits": [{"name": "tokens", "capacity": 500, "per_minute": 60}]},
    "broken": {"rate_limits": [{"name": "requests", "capacity": 100, "per_minute": 100}]},
    "prepaid": {"billing": "prepaid", "floor": Decimal(0)},
    "few-cents": {"billing": "prepaid", "floor": Decimal(0)},
    "changing": {},
    "never-seen": {},  # by any gateway until Postgres is away
    "suspended": {},
}


def main() -> None:
    with transaction.atomic():
        keys = {name: facts["key"] for name, facts in seed()["tenants"].items()}
    tier = Tier.objects.get(name="standard")
    for slug, fields in SPECIAL.items():
        tenant = services.create_tenant(ACTOR, slug, slug, tier, Tier.objects.filter(name="batch"), **fields)
        services.create_project(ACTOR, tenant, "default", "Default")
        keys[slug] = _key(slug)
    services.set_status(ACTOR, Tenant.objects.get(slug="suspended"), Tenant.Status.SUSPENDED)
    keys["expired"] = _key("alpha", expires_at=timezone.now() - timedelta(minutes=1))
    keys["no-scope"] = _key("alpha", scopes=["usage"])
    keys["elsewhere"] = _key("alpha", ip_ranges=["192.0.2.0/24"])
    keys["here"] = _key("alpha", ip_ranges=["127.0.0.0/8"])
    keys["other-model"] = _key("alpha", models=["something-else"])
    revoked = services.issue_key(ACTOR, _project("alpha"), "revoked")
    services.revoke_key(ACTOR, revoked.key)
    keys["revoked"] = revoked.text
    print(json.dumps(keys))


def _project(slug: str) -> Project:
    return Project.objects.get(tenant__slug=slug, slug="default")


def _key(slug: str, **fields: Any) -> str:
    return services.issue_key(ACTOR, _project(slug), "test", **fields).text


if __name__ == "__main__":
    main()
