"""May a request enter? The twin of `admit`'s checks: they read the state and change nothing."""

from __future__ import annotations

import math
from collections import Counter

from engine.protocol.fair import thousandths
from engine.protocol.functions import Admission, Verdict
from engine.protocol.twin_state import State

__all__ = ["Levels", "judge"]

_RETRY_CAP_S = 60

Levels = dict[str, float]
"""Levels of the tenant's token buckets after the request, by limit."""
_Refusal = tuple[str, str, int | None]


def judge(state: State, now: int, a: Admission) -> tuple[Verdict, Levels]:
    """The verdict as if it were committed, and the bucket levels to write then."""
    depth = len(state.waiting(a.pool, a.tier))
    rows, levels, short, wait_s = _buckets(state, now, a)
    refusal = _refusal(state, now, a, depth, short, wait_s)
    if refusal is None:
        return Verdict("ok", depth + 1, None, "", rows), levels
    code, detail, retry = refusal
    return Verdict(code, depth, retry, detail, rows), levels


def _buckets(
    state: State, now: int, a: Admission
) -> tuple[tuple[tuple[str, int, int, int], ...], Levels, str, int | None]:
    """Rows to answer, levels, the first limit that is short and the seconds until it no longer is (None: never)."""
    rows: list[tuple[str, int, int, int]] = []
    levels: Levels = {}
    short, wait_s = "", None
    for name, capacity, refill, cost in a.limits:
        if capacity < 0:
            continue
        was, at = state.buckets.get((a.tenant, name), (capacity, now))
        level: float = min(capacity, was + max(0, now - at) * refill / 60000)
        if level >= cost:
            level -= cost
        elif not short:
            short = name
            if cost <= capacity and refill > 0:
                wait_s = min(_RETRY_CAP_S, math.ceil((cost - level) * 60 / refill))
        levels[name] = level
        reset_s = math.ceil((capacity - level) * 60 / refill) if refill > 0 else 0
        rows.append((name, capacity, math.floor(level), reset_s))
    return tuple(rows), levels, short, wait_s


def _refusal(state: State, now: int, a: Admission, depth: int, short: str, wait_s: int | None) -> _Refusal | None:
    """Code, detail, retry seconds; None when nothing speaks against it."""
    generation = state.accounts[a.tenant].generation
    if generation is not None and generation > a.generation:
        return "stale_principal", "", None
    if (refusal := _claim(state, now, a)) is not None:
        return refusal
    if not any(lease > now for lease in state.engines[a.pool].values()):
        return "no_engine", "", None
    held = [r for r in state.requests.values() if r.a.tenant == a.tenant]
    if 0 <= a.max_concurrent <= sum(r.state != "finished" for r in held):
        return "concurrency_limit", "", _retry_after(state, now, a, 1)
    if short:
        return "rate_limit", short, wait_s
    mine = sum(r.a.tenant == a.tenant for r in state.waiting(a.pool, a.tier))
    if 0 <= a.max_queued_tenant <= mine:
        return "tenant_queue_full", "", _retry_after(state, now, a, mine)
    if 0 <= a.max_queued_tier <= depth:
        return "tier_queue_full", "", _retry_after(state, now, a, depth)
    if _sheds(state, now, a, depth, mine):
        return "tier_queue_full", "deadline", _retry_after(state, now, a, mine)
    return _money(state, a, sum(r.a.hold_nano for r in held))


def _sheds(state: State, now: int, a: Admission, depth: int, mine: int) -> bool:
    """Is the deadline of a sheddable tier lost to what waits before it?"""
    if not a.sheddable or a.ttft_ms <= 0 or not mine:
        return False
    gap, last = state.drain.get((a.pool, a.tier), (0.0, 0))
    return now - last <= 2 * gap and _ahead(state, a, depth, mine) * gap > a.ttft_ms


def _ahead(state: State, a: Admission, depth: int, mine: int) -> int:
    """Tenants are served in turn: as many of each as its own has queued, by their weights."""
    waiting, weights = state.waiting(a.pool, a.tier), state.fair[a.pool].weights
    queued = Counter(r.a.tenant for r in waiting)
    tenants = {r.a.tenant for r in waiting if not r.member.startswith("~")}
    lost = sum(r.member.startswith("~") for r in waiting)
    turns = (min(queued[tenant], mine * weights[tenant] // thousandths(a.weight)) for tenant in tenants)
    return min(depth, lost + sum(turns))


def _claim(state: State, now: int, a: Admission) -> _Refusal | None:
    claim = state.claims.get((a.tenant, a.claim.key)) if a.claim else None
    if a.claim is None or claim is None or claim.expires_ms <= now:
        return None
    if claim.digest != a.claim.digest:
        return "idempotency_conflict", claim.request, None
    return ("idempotency_replay" if claim.finished else "idempotency_in_flight"), claim.request, None


def _money(state: State, a: Admission, held_nano: int) -> _Refusal | None:
    balance = state.accounts[a.tenant].balance_nano
    if a.floor_nano is None:
        return None
    if balance is None:
        return "stale_principal", "balance", None
    return ("insufficient_quota", "", None) if balance - held_nano - a.hold_nano < a.floor_nano else None


def _retry_after(state: State, now: int, a: Admission, ahead: int) -> int | None:
    """From the measured time between two pulls of the tier; None while that is unknown."""
    if (a.pool, a.tier) not in state.drain:
        return None
    gap, last = state.drain[a.pool, a.tier]
    return max(1, min(_RETRY_CAP_S, math.ceil(ahead * max(gap, now - last) / 1000)))
