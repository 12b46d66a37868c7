"""Usage and outcome rows as the settler leaves them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

import uuid_utils
from django.utils import timezone

from gateway.metering.models import RequestOutcome
from tenants.billing.models import UsageRecord


def add_usage(request: UUID, tenant: str = "alpha", **fields: Any) -> None:
    facts = {
        "tier": "interactive",
        "pool": "smollm2-135m",
        "engine": "engine-1",
        "epoch": 0,
        "reason": "stop",
        "prompt_tokens": 31,
        "cached_tokens": 16,
        "completion_tokens": 64,
        "wasted_tokens": 0,
        "engine_s": 0.4,
        "joules": 0.0,
        "parked_s": 0.0,
        "parks": 0,
        "finished_at": timezone.now(),
        "currency": "USD",
        "money": Decimal("0.000123456"),
    }
    UsageRecord.objects.create(request_id=request, tenant=tenant, **(facts | fields))


def add_outcome(request: UUID, tenant: str = "alpha", **fields: Any) -> None:
    facts = {
        "project": "default",
        "key": "abcdefghijklmnop",
        "tier": "interactive",
        "pool": "smollm2-135m",
        "model": "smollm2-135m",
        "kind": "chat",
        "stream": True,
        "status": 200,
        "reason": "stop",
        "received_at": timezone.now(),
        "finished_at": timezone.now(),
        "ttft_s": 0.212,
        "tpot_s": 0.02,
        "total_s": 1.5,
        "delivered_tokens": 64,
        "prompt_tokens": 31,
        "ttft_target_ms": 1000,
        "tpot_target_ms": 100,
        "ttft_met": True,
        "tpot_met": True,
        "good": True,
    }
    RequestOutcome.objects.create(request_id=request, tenant=tenant, **(facts | fields))


def new_id() -> UUID:
    return UUID(bytes=uuid_utils.uuid7().bytes)
