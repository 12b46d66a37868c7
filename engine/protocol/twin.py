"""The functions of `functions.lua` as a pure state machine: same answers, same state, the time as an argument.

For the simulator, and as the readable specification: `tests/protocol/test_twin.py` proves that any interleaving of
calls gives what the Lua gives. Times are milliseconds, money nano-units.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.protocol.fair import UNIT, FairQueue, is_late, thousandths
from engine.protocol.functions import Admission, Adopted, Cancelled, Pull, Pulled, Reaped, Verdict
from engine.protocol.messages import Control, Delta, Final, Timeline, decode, encode

__all__ = ["Queue", "Record", "Twin"]

_TICK_LEASE_MS = 3000
_SCAN_LIMIT = 256
_REAP_LIMIT = 256
_RETRY_CAP_S = 60
_DRAIN_WEIGHT = 0.1
_REMEMBER_REAPED_MS = 3_600_000
_GRACE_MS = 60_000
_SERVED = ("stop", "length")

Refusal = tuple[str, str, int | None]


@dataclass(slots=True)
class Record:
    """One admitted request until it is closed."""

    a: Admission
    arrival: int
    admitted_ms: int
    member: str
    expires_ms: int
    gateway: str
    state: str = "queued"
    epoch: int = 0
    attempts: int = 0
    engine: str = ""
    pulled_ms: int = 0
    cancel: str = ""


@dataclass(slots=True)
class Resumable:
    """Who goes on with a resumable request; a higher turn is a later owner."""

    tenant: str
    gateway: str
    ask: str
    turn: int = 0
    told: bool = False


@dataclass(slots=True)
class Queue:
    """One stream: works by arrival number. Started ones stay in `entries` until their request ends."""

    waiting: OrderedDict[int, tuple[str, bytes]] = field(default_factory=OrderedDict)
    entries: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Account:
    generation: int | None = None
    balance_nano: int | None = None
    sequence: int | None = None
    held_nano: int = 0


@dataclass(slots=True)
class Claimed:
    digest: str
    request: str
    expires_ms: int
    finished: bool = False


class Twin:
    """All of a cell's state. Every method is one function of the library."""

    def __init__(self) -> None:
        self.requests: dict[str, Record] = {}
        self.queues: dict[tuple[str, str, str], Queue] = {}
        self.ready: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self.tiers: dict[str, dict[str, int]] = defaultdict(dict)
        self.depth: dict[str, dict[str, int]] = defaultdict(dict)
        self.fair: dict[str, FairQueue] = defaultdict(FairQueue)
        self.drain: dict[tuple[str, str], tuple[float, int]] = {}
        self.accounts: dict[str, Account] = defaultdict(Account)
        self.buckets: dict[tuple[str, str], tuple[float, int]] = {}
        self.claims: dict[tuple[str, str], Claimed] = {}
        self.open: dict[str, set[str]] = defaultdict(set)
        self.gateway_requests: dict[str, set[str]] = defaultdict(set)
        self.engine_requests: dict[str, set[str]] = defaultdict(set)
        self.gateways: dict[str, int] = {}
        self.reaped: dict[str, int] = {}
        self.engines: dict[str, dict[str, int]] = defaultdict(dict)
        self.pools: dict[str, str] = {}
        self.cards: dict[str, bytes] = {}
        self.expiry: dict[str, int] = {}
        self.resumable: dict[str, Resumable] = {}
        self.grace: dict[str, int] = {}
        self.replies: dict[str, list[Delta]] = {}
        self.controls: dict[str, list[Control]] = defaultdict(list)
        self.usage: list[Final] = []
        self.dead: list[str] = []
        self.era = ""
        self.arrivals = 0
        self.tick: tuple[int, int] | None = None

    # Parts of a request's state ----------------------------------------------------------------------------------

    def _order(self, engine: str, request: str, reason: str) -> None:
        self.controls[engine].append(Control("cancel", request, reason))

    def _reply_error(self, request: str, r: Record, code: str, detail: str) -> None:
        if r.gateway in self.replies:
            delta = Delta(request, 0, r.epoch, 0, (), "", finish="error", code=code, detail=detail, last=True)
            self.replies[r.gateway].append(delta)

    def _count_depth(self, r: Record, by: int) -> None:
        depth = self.depth[r.a.pool]
        for name in (r.a.tier, f"{r.a.tier}:{r.a.tenant}"):
            depth[name] = depth.get(name, 0) + by
            if depth[name] <= 0:
                del depth[name]

    def _unhold(self, r: Record) -> None:
        account = self.accounts[r.a.tenant]
        account.held_nano = max(0, account.held_nano - r.a.hold_nano)

    def _settle_claim(self, request: str, r: Record, finished: bool) -> None:
        if r.a.claim is None:
            return
        key = (r.a.tenant, r.a.claim.key)
        claim = self.claims.get(key)
        if claim is None or claim.request != request:
            return
        if finished:
            claim.finished = True
        else:
            del self.claims[key]

    def _key(self, r: Record) -> tuple[str, str, str]:
        return (r.a.pool, r.a.tier, r.member)

    def _ready(self, key: tuple[str, str, str]) -> dict[str, int]:
        return self.ready[key[0], f"{key[1]}!" if key[2].startswith("!") else key[1]]

    def _move_head(self, key: tuple[str, str, str]) -> None:
        queue, ready = self.queues.get(key), self._ready(key)
        if queue is not None and queue.waiting:
            ready[key[2]] = next(iter(queue.waiting))
        else:
            ready.pop(key[2], None)

    def _drop_entry(self, key: tuple[str, str, str], arrival: int) -> None:
        queue = self.queues.get(key)
        if queue is None:
            return
        queue.waiting.pop(arrival, None)
        queue.entries.discard(arrival)
        if not queue.entries:
            del self.queues[key]

    def _enqueue(self, request: str, r: Record, work: bytes) -> None:
        key = self._key(r)
        queue = self.queues.setdefault(key, Queue())
        queue.waiting[r.arrival] = (request, work)
        queue.entries.add(r.arrival)
        self._ready(key).setdefault(r.member, r.arrival)
        self.tiers[r.a.pool][r.a.tier] = r.a.tier_rank
        if r.expires_ms > 0:
            self.expiry[request] = r.expires_ms
        self._count_depth(r, 1)

    def _free_slots(self, request: str, r: Record) -> None:
        if r.state == "running":
            self.fair[r.a.pool].stop(r.a.tier, r.a.tenant)
        self.fair[r.a.pool].leave(r.a.tier, r.a.tenant)
        self.open[r.a.tenant].discard(request)
        self.gateway_requests[r.gateway].discard(request)
        self.engine_requests[r.engine].discard(request)
        self.grace.pop(request, None)

    def _leave_queue(self, request: str, r: Record) -> None:
        key = self._key(r)
        self._drop_entry(key, r.arrival)
        self._move_head(key)
        self.expiry.pop(request, None)
        self._count_depth(r, -1)

    def _unqueue(self, request: str, r: Record) -> None:
        self._leave_queue(request, r)
        self._free_slots(request, r)
        self._unhold(r)
        self._settle_claim(request, r, False)
        self.resumable.pop(request, None)
        del self.requests[request]

    def _expire(self, request: str, r: Record) -> None:
        self._reply_error(request, r, "queue_timeout", "not started before its deadline")
        self._unqueue(request, r)

    def _conclude(self, request: str, r: Record, final: Final, served: bool) -> None:
        self.usage.append(final)
        self._drop_entry(self._key(r), r.arrival)
        self._free_slots(request, r)
        self._settle_claim(request, r, served)
        r.state = "finished"

    def _lose_requests(self, now: int, engine: str) -> list[str]:
        lost = []
        for request in sorted(self.engine_requests.pop(engine, ())):
            r = self.requests.get(request)
            if r is None or r.state != "running" or r.engine != engine:
                continue
            r.epoch += 1
            r.state = "lost"
            self.fair[r.a.pool].stop(r.a.tier, r.a.tenant)
            if self.gateways.get(r.gateway, 0) > now:
                self._reply_error(request, r, "engine_lost", "the engine that computed this request was lost")
            else:
                self._conclude(request, r, _orphan(request, r, now), False)
            lost.append(request)
        self.controls.pop(engine, None)
        return lost

    # admit -------------------------------------------------------------------------------------------------------

    def admit(self, now: int, a: Admission, work: bytes) -> Verdict:
        depth = self.depth[a.pool].get(a.tier, 0)
        if a.request in self.requests:
            return Verdict("ok", depth)
        rows, levels, short, wait_s = self._fill_buckets(now, a)
        refusal = self._check_all(now, a, depth, short, wait_s)
        if refusal is not None:
            code, detail, retry = refusal
            return Verdict(code, depth, retry, detail, rows)
        self._commit_admission(now, a, work, levels)
        return Verdict("ok", depth + 1, None, "", rows)

    def _retry_after(self, now: int, a: Admission, ahead: int) -> int | None:
        if (a.pool, a.tier) not in self.drain:
            return None
        gap, last = self.drain[a.pool, a.tier]
        return max(1, min(_RETRY_CAP_S, math.ceil(ahead * max(gap, now - last) / 1000)))

    def _fill_buckets(
        self, now: int, a: Admission
    ) -> tuple[tuple[tuple[str, int, int, int], ...], dict[str, float], str, int | None]:
        rows: list[tuple[str, int, int, int]] = []
        levels: dict[str, float] = {}
        short, wait_s = "", None
        for name, capacity, refill, cost in a.limits:
            if capacity < 0:
                continue
            level: float = capacity
            if (a.tenant, name) in self.buckets:
                was, at = self.buckets[a.tenant, name]
                level = min(capacity, was + max(0, now - at) * refill / 60000)
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

    def _check_claim(self, now: int, a: Admission) -> Refusal | None:
        if a.claim is None:
            return None
        claim = self.claims.get((a.tenant, a.claim.key))
        if claim is None or claim.expires_ms <= now:
            return None
        if claim.digest != a.claim.digest:
            return "idempotency_conflict", claim.request, None
        return ("idempotency_replay" if claim.finished else "idempotency_in_flight"), claim.request, None

    def _check_all(self, now: int, a: Admission, depth: int, short: str, wait_s: int | None) -> Refusal | None:
        account = self.accounts[a.tenant]
        if account.generation is not None and account.generation > a.generation:
            return "stale_principal", "", None
        if (refusal := self._check_claim(now, a)) is not None:
            return refusal
        if not any(lease > now for lease in self.engines[a.pool].values()):
            return "no_engine", "", None
        if 0 <= a.max_concurrent <= len(self.open[a.tenant]):
            return "concurrency_limit", "", self._retry_after(now, a, 1)
        if short:
            return "rate_limit", short, wait_s
        mine = self.depth[a.pool].get(f"{a.tier}:{a.tenant}", 0)
        if 0 <= a.max_queued_tenant <= mine:
            return "tenant_queue_full", "", self._retry_after(now, a, mine)
        if 0 <= a.max_queued_tier <= depth:
            return "tier_queue_full", "", self._retry_after(now, a, depth)
        gap, _ = self.drain.get((a.pool, a.tier), (0.0, 0))
        ahead = min(depth, mine * len(self.fair[a.pool].active.get(a.tier, ())))
        if a.sheddable and 0 < a.ttft_ms < ahead * gap:
            return "tier_queue_full", "deadline", self._retry_after(now, a, mine)
        if a.floor_nano is not None:
            if account.balance_nano is None:
                return "stale_principal", "balance", None
            if account.balance_nano - account.held_nano - a.hold_nano < a.floor_nano:
                return "insufficient_quota", "", None
        return None

    def _open_gateway(self, gateway: str, expiry: int) -> None:
        self.gateways[gateway] = max(self.gateways.get(gateway, 0), expiry)
        self.replies.setdefault(gateway, [])

    def _commit_admission(self, now: int, a: Admission, work: bytes, levels: dict[str, float]) -> None:
        self.arrivals += 1
        r = Record(a, self.arrivals, now, a.tenant, a.expires_ms, a.gateway)
        for name, level in levels.items():
            self.buckets[a.tenant, name] = (level, now)
        if a.claim is not None:
            self.claims[a.tenant, a.claim.key] = Claimed(a.claim.digest, a.request, now + a.claim.ttl_ms)
        self.accounts[a.tenant].held_nano += a.hold_nano
        if a.ask:
            self.resumable[a.request] = Resumable(a.tenant, a.gateway, a.ask)
        self.open[a.tenant].add(a.request)
        self.gateway_requests[a.gateway].add(a.request)
        self._open_gateway(a.gateway, now + a.lease_ms)
        self.fair[a.pool].enter(a.tier, a.tenant, thousandths(a.weight))
        self._enqueue(a.request, r, work)
        self.requests[a.request] = r

    # pull --------------------------------------------------------------------------------------------------------

    def _queued(self, pool: str) -> list[tuple[str, int]]:
        """Tiers with anything queued, best first."""
        tiers = sorted(self.tiers[pool].items(), key=lambda item: (item[1], item[0]))
        return [(tier, rank) for tier, rank in tiers if self.ready[pool, tier] or self.ready[pool, f"{tier}!"]]

    def _heads(self, pool: str, tier: str, late: bool) -> list[tuple[int, str]]:
        ready = self.ready[pool, f"{tier}!" if late else tier]
        return sorted((arrival, member) for member, arrival in ready.items())

    def _relegate(self, request: str, r: Record, work: bytes) -> None:
        self._drop_entry(self._key(r), r.arrival)
        self._count_depth(r, -1)
        r.member = f"!{r.a.tenant}"
        self._enqueue(request, r, work)

    def _take(self, now: int, key: tuple[str, str, str], engine: str, light: bool) -> tuple[Record, bytes] | None:
        queue = self.queues.get(key)
        if queue is None or not queue.waiting:
            self._ready(key).pop(key[2], None)
            return None
        arrival, (request, work) = queue.waiting.popitem(last=False)
        self._move_head(key)
        r = self.requests.get(request)
        if r is None:
            self._drop_entry(key, arrival)
        elif r.state == "queued" and r.arrival == arrival and 0 < r.expires_ms <= now:
            self._expire(request, r)
        elif (
            r.state == "queued"
            and r.arrival == arrival
            and not light
            and is_late(r.member, now - r.admitted_ms, r.a.ttft_ms)
        ):
            self._relegate(request, r, work)
        elif r.state == "queued" and r.arrival == arrival:
            r.state, r.engine, r.pulled_ms = "running", engine, now
            r.attempts += 1
            self.engine_requests[engine].add(request)
            self.expiry.pop(request, None)
            self.fair[r.a.pool].start(r.a.tier, r.a.tenant, r.member.startswith("!"), light)
            self._count_depth(r, -1)
            self._measure_drain(now, r)
            return r, work
        return None

    def _measure_drain(self, now: int, r: Record) -> None:
        key = (r.a.pool, r.a.tier)
        was = self.drain.get(key)
        gap: float = max(0, now - max(was[1] if was else 0, r.admitted_ms))
        if was is not None:
            gap = was[0] + _DRAIN_WEIGHT * (gap - was[0])
        self.drain[key] = (gap, now)

    def pull(self, now: int, pool: str, engine: str, credit: Mapping[str, int], lease_ms: int = 3000) -> Pull:
        if engine not in self.engines[pool]:
            return Pull((), (), registered=False)
        self.engines[pool][engine] = now + lease_ms
        fair, left = self.fair[pool], dict(credit)
        works: list[Pulled] = []
        accounts: dict[str, float] = {}
        lines = fair.lines(self._queued(pool), left)
        for _ in range(_SCAN_LIMIT):
            pick = fair.pick(self._queued(pool), left, lambda tier, late: self._heads(pool, tier, late), lines)
            if pick is None:
                break
            taken = self._take(now, (pool, pick.tier, pick.tenant), engine, pick.light)
            if taken is None:
                continue
            r, work = taken
            for name in ("+",) if pick.express else self.tiers[pool]:
                left[name] = left.get(name, 0) - r.a.choices
            if r.attempts == 1:
                fair.charge(pick.tier, r.a.tenant, r.a.prompt_tokens * UNIT, self._queued(pool))
            works.append(Pulled(work, r.epoch, pick.by_floor))
            accounts[f"{pick.tier}:{r.a.tenant}"] = fair.counters.get((pick.tier, r.a.tenant), 0) / UNIT
        accounts |= {tier: deficit / UNIT for tier, deficit in fair.deficits.items()}
        controls = tuple(encode(c) for c in self.controls.pop(engine, ()))
        return Pull(tuple(works), controls, accounts)

    # Leases of engines and gateways ------------------------------------------------------------------------------

    def register(self, now: int, pool: str, engine: str, card_hash: str, card: bytes, lease_ms: int = 3000) -> str:
        others = (lease for name, lease in self.engines[pool].items() if name != engine)
        if any(lease > now for lease in others) and self.pools.get(pool) != card_hash:
            return "card_mismatch"
        self._lose_requests(now, engine)
        self.era = self.era or f"{now}:{engine}"
        self.pools[pool], self.cards[pool] = card_hash, card
        self.engines[pool][engine] = now + lease_ms
        return "ok"

    def leave(self, now: int, pool: str, engine: str) -> None:
        self.engines[pool].pop(engine, None)
        self._lose_requests(now, engine)

    def renew(self, now: int, gateway: str, lease_ms: int = 3000) -> bool:
        self._open_gateway(gateway, now + lease_ms)
        return self.reaped.pop(gateway, None) is None

    # Accounts ----------------------------------------------------------------------------------------------------

    def charge(self, now: int, pool: str, charges: Sequence[tuple[str, str, float]]) -> None:
        for tier, tenant, cost in charges:
            self.fair[pool].charge(tier, tenant, math.floor(cost * UNIT + 0.5), self._queued(pool))

    def _set_balance(self, tenant: str, balance_nano: int | None, sequence: int) -> bool:
        account = self.accounts[tenant]
        if balance_nano is None or (account.sequence is not None and account.sequence >= sequence):
            return False
        account.balance_nano, account.sequence = balance_nano, sequence
        return True

    def account(self, now: int, tenant: str, generation: int, balance_nano: int | None, sequence: int) -> bool:
        account = self.accounts[tenant]
        if account.generation is None or account.generation < generation:
            account.generation = generation
        return self._set_balance(tenant, balance_nano, sequence)

    # Endings -----------------------------------------------------------------------------------------------------

    def cancel(self, now: int, request: str, reason: str) -> Cancelled:
        r = self.requests.get(request)
        if r is None:
            return Cancelled("unknown")
        if r.state == "queued" and r.attempts > 0:
            self._leave_queue(request, r)
            r.state = "lost"
            return Cancelled("lost")
        if r.state == "queued":
            self._unqueue(request, r)
            return Cancelled("queued")
        if r.state == "running":
            r.cancel = reason
            self._order(r.engine, request, reason)
            return Cancelled("running")
        return Cancelled("unknown")

    def finish(self, now: int, request: str, epoch: int, final: bytes) -> bool:
        r = self.requests.get(request)
        if r is None or r.state not in ("running", "lost") or r.epoch != epoch:
            return False
        record = decode(final, Final)
        self._conclude(request, r, record, record.reason in _SERVED)
        return True

    def declare(self, now: int, request: str, final: bytes) -> bool:
        if request in self.requests:
            return False
        self.usage.append(decode(final, Final))
        return True

    def close(self, now: int, request: str, tenant: str, balance_nano: int | None, sequence: int) -> bool:
        self._set_balance(tenant, balance_nano, sequence)
        r = self.requests.get(request)
        if r is None:
            return False
        if r.state == "queued":
            self._unqueue(request, r)
            return True
        if r.state != "finished":
            self._drop_entry(self._key(r), r.arrival)
            self._free_slots(request, r)
            self._settle_claim(request, r, False)
        self._unhold(r)
        del self.requests[request]
        return True

    def requeue(self, now: int, request: str, epoch: int, work: bytes, max_attempts: int = 3) -> str:
        r = self.requests.get(request)
        if r is None or r.state != "lost" or r.epoch != epoch:
            return "stale"
        if r.attempts >= max_attempts:
            self.dead.append(request)
            return "poison"
        self._drop_entry(self._key(r), r.arrival)
        r.member, r.expires_ms, r.state = f"~{request}", 0, "queued"
        self._enqueue(request, r, work)
        return "queued"

    # Resuming ----------------------------------------------------------------------------------------------------

    def release(self, now: int, request: str, gateway: str, turn: int, how: str) -> str:
        kept = self.resumable.get(request)
        if kept is None:
            return "unknown"
        if (kept.gateway, kept.turn) != (gateway, turn):
            return "moved"
        r = self.requests.get(request)
        if how == "drop":
            del self.resumable[request]
        elif how == "told":
            kept.told = True
        elif r is not None and r.state != "finished":
            self.grace[request] = now + _GRACE_MS
        return "ok"

    def adopt(self, now: int, request: str, tenant: str, gateway: str) -> Adopted | None:
        kept, r = self.resumable.get(request), self.requests.get(request)
        if kept is None or kept.tenant != tenant or (r is not None and r.cancel):
            return None
        old, kept.gateway, kept.turn = kept.gateway, gateway, kept.turn + 1
        if old != gateway and old in self.replies:
            detail, epoch = "another connection goes on with this request", r.epoch if r else 0
            self.replies[old].append(
                Delta(
                    request, 0, epoch, kept.turn, (), "", finish="error", code="stream_moved", detail=detail, last=True
                )
            )
        if r is not None and r.state in ("queued", "running"):
            self.gateway_requests[r.gateway].discard(request)
            self.gateway_requests[gateway].add(request)
            r.gateway = gateway
            self.grace.pop(request, None)
        return Adopted(kept.turn, kept.ask, kept.told)

    def _end_grace(self, now: int, request: str) -> None:
        del self.grace[request]
        r = self.requests.get(request)
        if r is not None and r.state == "queued" and r.attempts == 0:
            self._unqueue(request, r)
        elif r is not None and r.state == "queued":
            self._leave_queue(request, r)
            self._conclude(request, r, _orphan(request, r, now), False)
        elif r is not None and r.state == "running":
            r.cancel = "client_disconnected"
            self._order(r.engine, request, r.cancel)
        self.resumable.pop(request, None)

    # reap --------------------------------------------------------------------------------------------------------

    def _reap_gateway(self, now: int, gateway: str) -> list[str]:
        aborted = []
        for request in sorted(self.gateway_requests.pop(gateway, ())):
            r = self.requests.get(request)
            if r is None:
                continue
            waits = r.state == "queued" and r.attempts == 0
            if r.a.ask and not r.cancel and (waits or r.state == "running"):
                r.gateway = ""
                if request in self.resumable:
                    self.resumable[request].gateway = ""
                self.grace.setdefault(request, now + _GRACE_MS)
                continue
            if waits:
                self._unqueue(request, r)
            elif r.state == "running":
                r.cancel, r.gateway = "gateway_lost", ""
                self._order(r.engine, request, "gateway_lost")
            elif r.state in ("lost", "queued"):
                if r.state == "queued":
                    self._leave_queue(request, r)
                self._conclude(request, r, _orphan(request, r, now), False)
            aborted.append(request)
        del self.gateways[gateway]
        self.reaped[gateway] = now
        self.replies.pop(gateway, None)
        return aborted

    def _armed(self, now: int) -> bool:
        armed = now + _TICK_LEASE_MS
        if self.tick is not None and now - self.tick[0] <= _TICK_LEASE_MS:
            armed = self.tick[1]
        self.tick = (now, armed)
        return now >= armed

    def reap(self, now: int) -> Reaped:
        due = sorted((at, request) for request, at in self.expiry.items() if at <= now)
        for _, request in due[:_REAP_LIMIT]:
            r = self.requests.get(request)
            if r is not None and r.state == "queued":
                self._expire(request, r)
            else:
                del self.expiry[request]
        late = sorted((at, request) for request, at in self.grace.items() if at <= now)
        for _, request in late[:_REAP_LIMIT]:
            self._end_grace(now, request)
        if not self._armed(now):
            return Reaped((), (), (), ())
        self.reaped = {g: at for g, at in self.reaped.items() if at > now - _REMEMBER_REAPED_MS}
        gateways = [g for _, g in sorted((lease, g) for g, lease in self.gateways.items() if lease <= now)]
        aborted = [request for g in gateways for request in self._reap_gateway(now, g)]
        engines: list[str] = []
        lost: list[str] = []
        for pool in sorted(self.pools):
            for _, engine in sorted((lease, e) for e, lease in self.engines[pool].items() if lease <= now):
                engines.append(engine)
                del self.engines[pool][engine]
                lost += self._lose_requests(now, engine)
        return Reaped(tuple(engines), tuple(gateways), tuple(lost), tuple(aborted))


def _orphan(request: str, r: Record, now: int) -> Final:
    """The Final of a request that lost both its engine and its gateway: the prompt is all that is known of it."""
    return Final(
        request, r.epoch, r.a.pool, r.a.tier, r.a.tenant, r.engine, "lost", r.a.prompt_tokens, 0, 0, 0, 0.0, 0.0,
        Timeline(queued_s=(r.pulled_ms - r.admitted_ms) / 1000), now, "engine_lost", "engine and gateway were lost",
    )  # fmt: skip
