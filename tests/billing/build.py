"""Records as an engine and a gateway make them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.db import connection

from engine.protocol.messages import Final, Outcome, Timeline
from tenants import services
from tenants.audit import Actor
from tenants.billing import services as billing
from tenants.billing.models import Price, PriceVersion
from tenants.models import Tenant, Tier
from tenants.partitions import uuid_floor

ACTOR = Actor("tests")
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
POOL = "tiny"
RATES = {"input_nano_per_mtok": 100_000_000, "cached_nano_per_mtok": 25_000_000, "output_nano_per_mtok": 400_000_000}


def tiers() -> list[Tier]:
    """interactive, standard, batch."""
    if not Tier.objects.exists():
        services.create_tier(ACTOR, "interactive", 0, 2_000, 150)
        services.create_tier(ACTOR, "standard", 1, 8_000, 300)
        services.create_tier(ACTOR, "batch", 2, 60_000, 1_000)
    return list(Tier.objects.order_by("rank"))


def tenant(slug: str = "acme", tier: int = 0, **fields: Any) -> Tenant:
    return services.create_tenant(ACTOR, slug, slug.title(), tiers()[tier], **fields)


def price(name: str = POOL, valid_from: datetime = LONG_AGO, **rates: int) -> PriceVersion:
    """A price class whose first version is in force since long ago."""
    row = Price.objects.filter(price_class=name).first() or billing.create_price(ACTOR, name)
    return billing.publish(ACTOR, row, valid_from=valid_from, **(RATES | rates))


def request_id(at: datetime | None = None) -> str:
    """A UUIDv7 of that time, as hex."""
    milliseconds = uuid_floor(at or datetime.now(UTC)).int >> 80
    return f"{milliseconds:012x}7{secrets.token_hex(2)[:3]}8{secrets.token_hex(8)[:15]}"


def final(request: str = "", tenant: str = "acme", **fields: Any) -> Final:
    facts: dict[str, Any] = {
        "epoch": 0,
        "pool": POOL,
        "tier": "interactive",
        "engine": "engine-1",
        "reason": "stop",
        "prompt_tokens": 100,
        "cached_tokens": 20,
        "completion_tokens": 30,
        "wasted_tokens": 0,
        "engine_s": 0.4,
        "joules": 1.5,
        "timeline": Timeline(0.1, 0.2, 0.3),
        "at_ms": int(time.time() * 1000),
    }
    return Final(request=request or request_id(), tenant=tenant, **(facts | fields))


def outcome(request: str = "", tenant: str = "acme", **fields: Any) -> Outcome:
    facts: dict[str, Any] = {
        "pool": POOL,
        "tier": "interactive",
        "project": "default",
        "key": "",
        "model": POOL,
        "kind": "chat",
        "stream": True,
        "status": 200,
        "reason": "stop",
        "received_ms": int(time.time() * 1000),
        "ttft_s": 0.5,
        "tpot_s": 0.05,
        "stall_s": 0.1,
        "total_s": 2.0,
        "delivered_tokens": 30,
        "prompt_tokens": 100,
    }
    return Outcome(request=request or request_id(), tenant=tenant, **(facts | fields))


COST = Decimal("0.0000205")
"""Of `final()` at RATES: 80 fresh, 20 cached and 30 output tokens."""


def in_threads(works: Iterable[Callable[[], object]], timeout_s: float = 60) -> None:
    """Run all at once, each with a database connection of its own; raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
