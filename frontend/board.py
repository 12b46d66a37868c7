"""The live page's view model: a snapshot and its age turned into rows, charts and notices for one viewer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Generic, TypeVar

from django.utils.safestring import SafeString

from frontend.charts import meter, sparkline, target_bar
from frontend.history import OUTAGE_IS_NEWS_MS, History
from frontend.snapshot import EngineLine, Scope, Snapshot, TenantLine, TierLine, scoped
from frontend.templatetags.figures import clock

__all__ = ["SHOWN_TENANTS", "STALE_S", "Board", "EngineRow", "Row", "TierGroup", "build"]

STALE_S = 3.0
"""Older than this, a figure is shown as what it was, not as what it is."""
SHOWN_TENANTS = 40
"""Of one tier. The page is drawn and sent every second: a thousand tenants would be a megabyte each time."""
Line = TypeVar("Line", TierLine, TenantLine)


@dataclass(frozen=True, slots=True)
class Row(Generic[Line]):
    """One line of figures: a tier's or a tenant's."""

    line: Line
    bar: SafeString
    spark: SafeString
    over: bool
    """The time to first token is past the tier's target."""
    requests: int | None


@dataclass(frozen=True, slots=True)
class TierGroup:
    """A tier, its totals (None for a viewer who may not see them) and its tenants."""

    tier: TierLine
    total: Row[TierLine] | None
    tenants: tuple[Row[TenantLine], ...]
    quieter: int
    """Tenants left out because others are busier."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine. `silent`: its heartbeat is too old, so its figures are history."""

    line: EngineLine
    age_s: float
    silent: bool
    kv_used: float | None
    bar: SafeString

    @property
    def state(self) -> str:
        return "silent" if self.silent else self.line.state


@dataclass(frozen=True, slots=True)
class Board:
    """Everything the live page says."""

    at_ms: int | None = None
    age_s: float | None = None
    stale: bool = True
    window_s: float | None = None
    events_lag_ms: float | None = None
    notices: tuple[str, ...] = ()
    """Sentences that change only when what they say changes: they are read out."""
    summary: dict[str, object] = field(default_factory=dict)
    groups: tuple[TierGroup, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    staff: bool = False

    @property
    def age_ms(self) -> int | None:
        return None if self.age_s is None else round(self.age_s * 1000)


def build(
    snapshot: Snapshot | None,
    *,
    age_s: float | None,
    history: History,
    scope: Scope,
    connected: bool = True,
    unreadable: bool = False,
) -> Board:
    """The page for one viewer. `age_s` is the snapshot's age now; None means that there is no snapshot."""
    trouble = _feed_notices(snapshot, age_s, connected, unreadable)
    if snapshot is None or age_s is None:
        return Board(notices=tuple(trouble), staff=scope.staff)
    stale = age_s > STALE_S
    engines = tuple(_engine(line, age_s, stale) for line in [*snapshot.engines, *history.lost(snapshot)])
    seen = scoped(snapshot, scope)
    groups = tuple(_group(tier, history, scope, seen.at_ms) for tier in sorted(seen.tiers, key=lambda tier: tier.rank))
    return Board(
        at_ms=snapshot.at_ms,
        age_s=age_s,
        stale=stale,
        window_s=snapshot.window_s,
        events_lag_ms=snapshot.events_lag_ms if scope.staff else None,
        notices=tuple(trouble if stale else trouble + _engine_notices(engines, scope)),
        summary=_summary(seen.tiers, engines) if scope.staff else {},
        groups=groups,
        engines=engines if scope.staff else (),
        staff=scope.staff,
    )


def _feed_notices(snapshot: Snapshot | None, age_s: float | None, connected: bool, unreadable: bool) -> list[str]:
    notices = []
    if not connected:
        notices.append("The console can't reach Redis; it keeps trying.")
    if unreadable:
        notices.append("The live data can't be read: the console and the metering worker are of different versions.")
    if snapshot is None or age_s is None:
        notices.append("No live data has arrived yet. The metering worker publishes it once a second.")
    elif age_s > STALE_S:
        notices.append(f"Live data stopped at {clock(snapshot.at_ms)} UTC. The figures below are not current.")
    return notices


def _engine_notices(engines: Sequence[EngineRow], scope: Scope) -> list[str]:
    if not engines:
        return ["No engine is connected: requests can't be served."]
    ready = {row.line.pool for row in engines if row.state == "ready"}
    notices = [
        f"No engine is ready for {pool}: its requests wait or are refused."
        for pool in sorted({row.line.pool for row in engines} - ready)
    ]
    if scope.staff:
        notices += [
            f"Engine {row.line.engine} has been silent since {clock(row.line.at_ms)} UTC."
            for row in engines
            if row.silent and (row.line.pool not in ready or row.age_s * 1000 < OUTAGE_IS_NEWS_MS)
        ]
    return notices


def _group(tier: TierLine, history: History, scope: Scope, now_ms: int) -> TierGroup:
    total = None
    if scope.staff:
        known = [line.requests for line in tier.tenants if line.requests is not None]
        spark = sparkline(history.tiers.get(tier.tier, ()), now_ms, tier.ttft_target_ms)
        total = _row(tier, tier, spark, sum(known) if known else None)
    rows = []
    for line in _busiest(tier.tenants):
        points = () if scope.staff else history.tenants.get((tier.tier, line.tenant), ())
        # A line per tenant would weigh more than the rest of the page; members have few tenants.
        spark = SafeString("") if scope.staff else sparkline(points, now_ms, tier.ttft_target_ms)
        rows.append(_row(tier, line, spark, line.requests))
    return TierGroup(tier, total, tuple(rows), len(tier.tenants) - len(rows))


def _busiest(lines: tuple[TenantLine, ...]) -> list[TenantLine]:
    """At most `SHOWN_TENANTS`, in the snapshot's own order: rows must not jump about every second."""
    ranked = sorted(
        range(len(lines)),
        key=lambda i: ((lines[i].queued or 0) + (lines[i].running or 0), lines[i].tokens_per_s or 0.0),
        reverse=True,
    )
    return [lines[i] for i in sorted(ranked[:SHOWN_TENANTS])]


def _row(tier: TierLine, line: Line, spark: SafeString, requests: int | None) -> Row[Line]:
    value, target = line.ttft_p95_ms, tier.ttft_target_ms
    over = value is not None and bool(target) and value > (target or 0)
    return Row(line, target_bar(value, target), spark, over, requests)


def _engine(line: EngineLine, snapshot_age_s: float, stale: bool) -> EngineRow:
    """While the snapshot itself is stale nobody knows whether an engine is silent: the last state known stays."""
    known_s = line.age_ms / 1000
    age_s = known_s + snapshot_age_s
    silent = (known_s if stale else age_s) > STALE_S
    used, bar = None, SafeString("")
    if line.kv_blocks > 0:
        used = max(0, line.kv_blocks - line.kv_free - line.kv_cached) / line.kv_blocks
        bar = meter(used, line.kv_cached / line.kv_blocks)
    return EngineRow(line, age_s, silent, used, bar)


def _summary(tiers: Iterable[TierLine], engines: Sequence[EngineRow]) -> dict[str, object]:
    tiers = list(tiers)
    waits = [tier.oldest_wait_s for tier in tiers if tier.oldest_wait_s is not None]
    return {
        "queued": _total([tier.queued for tier in tiers]),
        "oldest_wait_s": max(waits, default=None),
        "running": _total([tier.running for tier in tiers]),
        "tokens_per_s": _total([tier.tokens_per_s for tier in tiers]),
        "ready": sum(row.state == "ready" for row in engines),
        "engines": len(engines),
        "money": _money(tiers),
    }


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _money(tiers: Iterable[TierLine]) -> list[tuple[str, Decimal]]:
    """Sums by currency; amounts of different currencies are never added."""
    sums: dict[str, Decimal] = {}
    for tier in tiers:
        if tier.money is not None:
            try:
                sums[tier.currency or ""] = sums.get(tier.currency or "", Decimal(0)) + Decimal(tier.money)
            except InvalidOperation:
                continue
    return sorted(sums.items())
