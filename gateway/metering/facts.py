"""What the live view needs of Postgres: names, targets, verdicts of the last minute and the money of the day."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from django.db import connection

from gateway.metering.window import Group
from tenants.models import Tenant, Tier

__all__ = ["Facts", "load"]


@dataclass(slots=True)
class Facts:
    """Figures by (tier, tenant)."""

    tiers: list[Tier]
    names: dict[str, str]
    day: datetime
    """Start of the UTC day."""
    verdicts: dict[Group, tuple[int, int]] = field(default_factory=dict)
    """(good, finished) of requests that ended in the window."""
    money: dict[Group, tuple[Decimal, str]] = field(default_factory=dict)
    """(amount, currency) since `day`."""


# Minutes that wait for their rollup are read from their rows, so that a request shows at once.
_MONEY = """
SELECT tier, tenant, max(currency), sum(money) FROM (
    SELECT tier, tenant, currency, money FROM metering_minuterollup
    WHERE minute >= %(day)s AND minute NOT IN (SELECT minute FROM metering_dirtyminute)
    UNION ALL
    SELECT u.tier, u.tenant, u.currency, u.money
    FROM (SELECT DISTINCT minute FROM metering_dirtyminute WHERE minute >= %(day)s) d
    JOIN billing_usagerecord u ON u.request_id >= sluice_uuid_floor(d.minute)
                              AND u.request_id < sluice_uuid_floor(d.minute + interval '1 minute')
) t GROUP BY tier, tenant HAVING max(currency) <> ''
"""

_VERDICTS = """
SELECT tier, tenant, count(*) FILTER (WHERE good), count(*)
FROM metering_requestoutcome WHERE finished_at >= %(since)s GROUP BY tier, tenant
"""


def load(now: datetime, window: timedelta) -> Facts:
    """Raises django.db.DatabaseError when Postgres is away."""
    facts = Facts(
        tiers=list(Tier.objects.order_by("rank")),
        names=dict(Tenant.objects.values_list("slug", "name")),
        day=now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0),
    )
    with connection.cursor() as cursor:
        cursor.execute(_VERDICTS, {"since": now - window})
        facts.verdicts = {(tier, tenant): (good, total) for tier, tenant, good, total in cursor.fetchall()}
        cursor.execute(_MONEY, {"day": facts.day})
        facts.money = {(tier, tenant): (money, currency) for tier, tenant, currency, money in cursor.fetchall()}
    return facts
