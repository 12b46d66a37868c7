"""Reads behind the requests page: the usage row and the outcome row of each request as one line, newest first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

from django.db.models import Model, QuerySet
from django.utils import timezone

from frontend.snapshot import Scope
from gateway.metering.models import RequestOutcome
from tenants.billing.models import UsageRecord
from tenants.partitions import uuid_floor, uuid_time

__all__ = ["PAGE", "Page", "RequestLine", "find_request", "parse_request_id", "recent_requests"]

PAGE = 50
CLIENT_LEFT = 499
RECENT = timedelta(hours=1)
_ID = re.compile(r"(?:^|-)([0-9a-f]{32})$")
Row = TypeVar("Row", bound=Model)


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request as its records tell it. `usage` or `outcome` may still be on its way, or never come."""

    request: UUID
    usage: UsageRecord | None
    outcome: RequestOutcome | None
    sees_money: bool

    @property
    def facts(self) -> UsageRecord | RequestOutcome:
        facts = self.usage or self.outcome
        if facts is None:
            raise ValueError("a line needs a record")
        return facts

    @property
    def at(self) -> datetime:
        """Time of admission, UTC."""
        return uuid_time(self.request)

    @property
    def prompt_tokens(self) -> int:
        return self.facts.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.usage.cached_tokens if self.usage is not None else 0

    @property
    def ttft_s(self) -> float | None:
        return self.outcome.ttft_s if self.outcome is not None else None

    @property
    def output_tokens(self) -> int:
        if self.usage is not None:
            return self.usage.completion_tokens
        return self.outcome.delivered_tokens if self.outcome is not None else 0

    @property
    def model(self) -> str:
        return self.outcome.model if self.outcome is not None else self.facts.pool

    @property
    def ending(self) -> str:
        """How it ended, in a word: the error code if there is one, else the reason."""
        return self.facts.code or self.facts.reason

    @property
    def verdict(self) -> tuple[str, str]:
        """(kind, words) of the SLO verdict; kinds: met, missed, pending."""
        outcome = self.outcome
        if outcome is None:
            return "pending", "no verdict yet"
        if outcome.good:
            return "met", "met"
        missed = [name for name, met in (("TTFT", outcome.ttft_met), ("TPOT", outcome.tpot_met)) if met is False]
        if missed:
            return "missed", " and ".join(missed) + " missed"
        return "missed", "client left" if outcome.status == CLIENT_LEFT else f"failed ({outcome.status})"

    @property
    def money(self) -> Decimal | None:
        return self.usage.money if self.usage is not None and self.sees_money else None

    @property
    def currency(self) -> str:
        return self.usage.currency if self.usage is not None else ""


@dataclass(frozen=True, slots=True)
class Page:
    """Lines, newest first, and where the next page begins (None: there is none)."""

    lines: tuple[RequestLine, ...]
    older: str | None


def parse_request_id(text: str) -> UUID | None:
    """The request named by an id as clients see it (`chatcmpl-…`), as the record keeps it, or as a UUID; else None."""
    match = _ID.search(text.strip().lower())
    if match:
        return UUID(match.group(1))
    try:
        return UUID(text.strip())
    except ValueError:
        return None


def recent_requests(scope: Scope, before: UUID | None = None, size: int = PAGE) -> Page:
    """The newest requests of the last hour older than `before`: two range scans on the time-ordered key, merged."""
    since = uuid_floor(timezone.now() - RECENT)
    usages = _newest(UsageRecord.objects.all(), scope, since, before, size)
    outcomes = _newest(RequestOutcome.objects.all(), scope, since, before, size)
    # The newest `size` of the union are among the newest `size` of each; one more tells whether a page follows.
    ids = sorted(usages.keys() | outcomes.keys(), reverse=True)
    shown = ids[:size]
    # A page of one kind may end before the other's record of the same request was reached.
    usages |= _missing(UsageRecord.objects.all(), scope, shown, usages)
    outcomes |= _missing(RequestOutcome.objects.all(), scope, shown, outcomes)
    lines = tuple(_line(request, usages, outcomes, scope) for request in shown)
    return Page(lines, shown[-1].hex if len(ids) > size else None)


def find_request(scope: Scope, request: UUID) -> RequestLine | None:
    """One request, however old, if the viewer may see it."""
    usages = _missing(UsageRecord.objects.all(), scope, [request], {})
    outcomes = _missing(RequestOutcome.objects.all(), scope, [request], {})
    return _line(request, usages, outcomes, scope) if usages or outcomes else None


def _newest(rows: QuerySet[Row], scope: Scope, since: UUID, before: UUID | None, size: int) -> dict[UUID, Row]:
    rows = _visible(rows, scope).filter(request_id__gte=since)
    if before is not None:
        rows = rows.filter(request_id__lt=before)
    return _by_id(rows.order_by("-request_id")[: size + 1])


def _missing(rows: QuerySet[Row], scope: Scope, wanted: Iterable[UUID], have: dict[UUID, Row]) -> dict[UUID, Row]:
    ids = [request for request in wanted if request not in have]
    return _by_id(_visible(rows, scope).filter(request_id__in=ids)) if ids else {}


def _visible(rows: QuerySet[Row], scope: Scope) -> QuerySet[Row]:
    return rows if scope.staff else rows.filter(tenant__in=scope.tenants)


def _by_id(rows: Iterable[Any]) -> dict[UUID, Any]:
    return {row.request_id: row for row in rows}


def _line(
    request: UUID, usages: dict[UUID, UsageRecord], outcomes: dict[UUID, RequestOutcome], scope: Scope
) -> RequestLine:
    line = RequestLine(request, usages.get(request), outcomes.get(request), sees_money=False)
    return replace(line, sees_money=scope.sees_money(line.facts.tenant))
