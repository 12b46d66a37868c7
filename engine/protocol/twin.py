"""The functions of `functions.lua` as a pure state machine: same answers, same state, the time as an argument.

The readable specification: `tests/protocol/test_twin.py` proves that any interleaving of calls gives what the Lua
gives. Times are milliseconds, money nano-units. (The simulator queues with `fair.py`, of which this is made too.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from engine.protocol.fair import UNIT, Line, Pick, is_late, thousandths
from engine.protocol.functions import Admission, Adopted, Cancelled, Handed, Pull, Pulled, Reaped, Verdict
from engine.protocol.messages import Final, decode, encode
from engine.protocol.twin_limits import Levels, judge
from engine.protocol.twin_state import Claimed, Record, Resumable, Standing, State

__all__ = ["Twin"]

_TICK_LEASE_MS = 3000
_SCAN_LIMIT = 256
_REAP_LIMIT = 256
_DRAIN_WEIGHT = 0.1
_REMEMBER_REAPED_MS = 3_600_000
_GRACE_MS = 60_000
_STANDING_MS = 400
_STANDING_LOOKS = 8
_HANDED_BYTES = 65_536
_SERVED = ("stop", "length")


class Twin(State):
    """Every public method but those of `State` is one function of the library."""

    # admit -------------------------------------------------------------------------------------------------------

    def admit(self, now: int, a: Admission, work: bytes) -> Verdict:
        if a.request in self.requests:
            return Verdict("ok", len(self.waiting(a.pool, a.tier)))
        verdict, levels = judge(self, now, a)
        if verdict.ok:
            self._commit_admission(now, a, work, levels)
            handed = self._hand_over(now, a.pool) if len(work) <= _HANDED_BYTES else None
            if handed is not None and handed.a.tier == a.tier:
                verdict = replace(verdict, depth=verdict.depth - 1)
        return verdict

    def _open_gateway(self, gateway: str, expiry: int) -> None:
        self.gateways[gateway] = max(self.gateways.get(gateway, 0), expiry)
        self.replies.setdefault(gateway, [])

    def _commit_admission(self, now: int, a: Admission, work: bytes, levels: Levels) -> None:
        self.arrivals += 1
        r = self.requests[a.request] = Record(a, work, self.arrivals, now, a.tenant, a.expires_ms, a.gateway)
        self.buckets |= {(a.tenant, name): (level, now) for name, level in levels.items()}
        if a.claim is not None:
            self.claims[a.tenant, a.claim.key] = Claimed(a.claim.digest, a.request, now + a.claim.ttl_ms)
        if a.ask:
            self.resumable[a.request] = Resumable(a.tenant, a.gateway, a.ask)
        self._open_gateway(a.gateway, now + a.lease_ms)
        heads = partial(self._heads, a.pool)
        self.fair[a.pool].enter(a.tier, a.tenant, heads, thousandths(a.weight), a.choices)
        self.enqueue(r)

    # pull --------------------------------------------------------------------------------------------------------

    def _queued(self, pool: str) -> list[tuple[str, int]]:
        """Tiers with anything queued, best first."""
        tiers = sorted(self.tiers[pool].items(), key=lambda item: (item[1], item[0]))
        return [(tier, rank) for tier, rank in tiers if self.waiting(pool, tier)]

    def _heads(self, pool: str, tier: str, late: bool) -> list[tuple[int, str]]:
        queues = self.queues[pool, tier].items()
        return sorted((next(iter(q.waiting)), m) for m, q in queues if q.waiting and m.startswith("!") is late)

    def _take(self, now: int, pool: str, pick: Pick, line: Line, engine: str) -> Record | None:
        """The head of a queue; None when it has expired, or is late and was moved to the queue of late ones."""
        queue = self.queues[pool, pick.tier][pick.tenant]
        r = next(iter(queue.waiting.values()))
        if 0 < r.expires_ms <= now:
            self.expire(r)
            return None
        if not pick.light and is_late(pick.tenant, now - r.admitted_ms, r.a.ttft_ms):
            self.drop_entry(r)
            r.member = f"!{r.a.tenant}"
            self.enqueue(r)
            return None
        del queue.waiting[r.arrival]
        r.state, r.engine, r.pulled_ms, r.attempts = "running", engine, now, r.attempts + 1
        self.fair[pool].start(pick, line, r.a.choices)
        self._measure_drain(now, r)
        return r

    def _measure_drain(self, now: int, r: Record) -> None:
        key = (r.a.pool, r.a.tier)
        was = self.drain.get(key)
        gap: float = max(0, now - max(was[1] if was else 0, r.admitted_ms))
        if was is not None:
            gap = was[0] + _DRAIN_WEIGHT * (gap - was[0])
        self.drain[key] = (gap, now)

    def _taken(
        self, now: int, pool: str, engine: str, credit: dict[str, int], looks: int
    ) -> Iterator[tuple[Record, Pick]]:
        """What the queue serves next for this credit, which is used up by it; and how it was chosen."""
        fair = self.fair[pool]
        lines = fair.lines(self._queued(pool), credit)
        for _ in range(looks):
            pick = fair.pick(self._queued(pool), credit, partial(self._heads, pool), lines)
            if pick is None:
                return
            r = self._take(now, pool, pick, lines[pick.tier], engine)
            if r is None:
                continue
            for name in (pick.express,) if pick.express else {*self.tiers[pool], *credit}:
                if pick.express or name[0] != "+":
                    credit[name] = credit.get(name, 0) - r.a.choices
            if r.attempts == 1:
                fair.charge(pick.tier, r.a.tenant, r.a.prompt_tokens * UNIT, self._queued(pool))
            yield r, pick

    def _accounts(self, pool: str, taken: Sequence[Record]) -> dict[str, float]:
        fair = self.fair[pool]
        counters = {f"{r.a.tier}:{r.a.tenant}": fair.counters.get((r.a.tier, r.a.tenant), 0) / UNIT for r in taken}
        return counters | {tier: deficit / UNIT for tier, deficit in fair.deficits.items()}

    def pull(
        self,
        now: int,
        pool: str,
        engine: str,
        credit: Mapping[str, int],
        lease_ms: int = 3000,
        tokens: int = 0,
        known: int | None = None,
    ) -> Pull:
        if engine not in self.engines[pool]:
            return Pull((), (), registered=False)
        self.engines[pool][engine] = now + lease_ms
        left = dict(credit)
        has = len(self.those(lambda r: r.state == "running" and r.engine == engine))
        if known is not None and has > known:
            coming, express = has - known, credit.get("+", 0)
            most = max([0, *(slots for tier, slots in credit.items() if tier[0] != "+")])
            left = {tier: slots if tier[0] == "+" else slots - coming for tier, slots in credit.items()}
            left["+"] = min(express, max(0, most + express - coming))
        taken = list(self._taken(now, pool, engine, left, _SCAN_LIMIT))
        room = tokens - sum(r.a.prompt_tokens for r, _ in taken)
        stood = self.standing[pool].get(engine)
        self._stand(pool, engine, Standing(stood.turn if stood else self.arrivals, left, room, now + _STANDING_MS))
        controls = tuple(encode(c) for c in self.controls.pop(engine, ()))
        works = tuple(Pulled(r.work, r.epoch, pick.by_floor, pick.light) for r, pick in taken)
        return Pull(works, controls, self._accounts(pool, [r for r, _ in taken]))

    # Standing pulls ----------------------------------------------------------------------------------------------

    def _stand(self, pool: str, engine: str, standing: Standing) -> None:
        if standing.tokens > 0 and any(slots > 0 for slots in standing.credit.values()):
            self.standing[pool][engine] = standing
        else:
            self.standing[pool].pop(engine, None)

    def _hand_over(self, now: int, pool: str) -> Record | None:
        """Pull for the engine whose turn it is. What it was handed."""
        turns = sorted((s.turn, engine) for engine, s in self.standing[pool].items())
        for _, engine in turns[:_STANDING_LOOKS]:
            standing = self.standing[pool][engine]
            if standing.until_ms > now and engine in self.listeners:
                return self._hand_to(now, pool, engine, standing)
            del self.standing[pool][engine]
        return None

    def _hand_to(self, now: int, pool: str, engine: str, s: Standing) -> Record | None:
        for r, pick in self._taken(now, pool, engine, s.credit, _STANDING_LOOKS):
            handed = Handed(Pulled(r.work, r.epoch, pick.by_floor, pick.light), self._accounts(pool, [r]))
            self.handed[engine].append(handed)
            self._stand(pool, engine, Standing(r.arrival, s.credit, s.tokens - r.a.prompt_tokens, s.until_ms))
            return r
        return None

    # Leases of engines and gateways ------------------------------------------------------------------------------

    def register(self, now: int, pool: str, engine: str, card_hash: str, card: bytes, lease_ms: int = 3000) -> str:
        others = (lease for name, lease in self.engines[pool].items() if name != engine)
        if any(lease > now for lease in others) and self.pools.get(pool) != card_hash:
            return "card_mismatch"
        self.lose_requests(now, pool, engine)
        self.era = self.era or f"{now}:{engine}"
        self.pools[pool], self.cards[pool] = card_hash, card
        self.engines[pool][engine] = now + lease_ms
        return "ok"

    def leave(self, now: int, pool: str, engine: str) -> None:
        self.engines[pool].pop(engine, None)
        self.lose_requests(now, pool, engine)

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
        account.generation = max(generation, account.generation or generation)
        return self._set_balance(tenant, balance_nano, sequence)

    # Endings -----------------------------------------------------------------------------------------------------

    def cancel(self, now: int, request: str, reason: str) -> Cancelled:
        r = self.requests.get(request)
        if r is None or r.state not in ("queued", "running"):
            return Cancelled("unknown")
        was = r.state
        if was == "running":
            self.order(r, reason)
        elif r.attempts == 0:
            self.unqueue(r)
        else:
            self.drop_entry(r)
            r.state = was = "lost"
        return Cancelled(was)

    def finish(self, now: int, request: str, epoch: int, final: bytes) -> bool:
        r = self.requests.get(request)
        if r is None or r.state not in ("running", "lost") or r.epoch != epoch:
            return False
        record = decode(final, Final)
        self.conclude(r, record, record.reason in _SERVED)
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
            self.unqueue(r)
            return True
        if r.state != "finished":
            self.free(r, False)
        del self.requests[request]
        return True

    def requeue(self, now: int, request: str, epoch: int, work: bytes, max_attempts: int = 3) -> str:
        r = self.requests.get(request)
        if r is None or r.state != "lost" or r.epoch != epoch:
            return "stale"
        if r.attempts >= max_attempts:
            self.dead.append(request)
            return "poison"
        self.drop_entry(r)
        r.member, r.expires_ms, r.state, r.work = f"~{request}", 0, "queued", work
        self.enqueue(r)
        return "queued"

    # Resuming ----------------------------------------------------------------------------------------------------

    def release(self, now: int, request: str, gateway: str, turn: int, how: str) -> str:
        kept, r = self.resumable.get(request), self.requests.get(request)
        if kept is None:
            return "unknown"
        if (kept.gateway, kept.turn) != (gateway, turn):
            return "moved"
        if how == "drop":
            del self.resumable[request]
        elif how == "told":
            kept.told = True
        elif r is not None and r.state != "finished":
            r.grace_ms = now + _GRACE_MS
        return "ok"

    def adopt(self, now: int, request: str, tenant: str, gateway: str) -> Adopted | None:
        kept, r = self.resumable.get(request), self.requests.get(request)
        if kept is None or kept.tenant != tenant or (r is not None and r.cancel):
            return None
        old, kept.gateway, kept.turn = kept.gateway, gateway, kept.turn + 1
        if old != gateway:
            detail = "another connection goes on with this request"
            self.tell(old, request, r.epoch if r else 0, "stream_moved", detail, kept.turn)
        if r is not None and r.state in ("queued", "running"):
            r.gateway, r.grace_ms = gateway, 0
        return Adopted(kept.turn, kept.ask, kept.told)

    def _end_grace(self, now: int, r: Record) -> None:
        r.grace_ms = 0
        if r.state == "running":
            self.order(r, "client_disconnected")
        elif r.state == "queued" and r.attempts == 0:
            self.unqueue(r)
        elif r.state == "queued":
            self.conclude_orphan(now, r)
        self.resumable.pop(r.a.request, None)

    # reap --------------------------------------------------------------------------------------------------------

    def _reap_gateway(self, now: int, gateway: str) -> list[str]:
        aborted = []
        for r in self.those(lambda r: r.gateway == gateway and r.state != "finished"):
            waits = r.state == "queued" and r.attempts == 0
            if r.a.ask and not r.cancel and (waits or r.state == "running"):
                r.gateway = ""
                if r.a.request in self.resumable:
                    self.resumable[r.a.request].gateway = ""
                r.grace_ms = r.grace_ms or now + _GRACE_MS
                continue
            if waits:
                self.unqueue(r)
            elif r.state == "running":
                self.order(r, "gateway_lost")
                r.gateway = ""
            else:
                self.conclude_orphan(now, r)
            aborted.append(r.a.request)
        del self.gateways[gateway]
        self.reaped[gateway] = now
        self.replies.pop(gateway, None)
        return aborted

    def _armed(self, now: int) -> bool:
        """One lease after nobody reaped for longer than that."""
        armed = now + _TICK_LEASE_MS
        if self.tick is not None and now - self.tick[0] <= _TICK_LEASE_MS:
            armed = self.tick[1]
        self.tick = (now, armed)
        return now >= armed

    def reap(self, now: int) -> Reaped:
        due = self.those(lambda r: r.state == "queued" and 0 < r.expires_ms <= now)
        for r in sorted(due, key=lambda r: r.expires_ms)[:_REAP_LIMIT]:
            self.expire(r)
        for r in sorted(self.those(lambda r: 0 < r.grace_ms <= now), key=lambda r: r.grace_ms)[:_REAP_LIMIT]:
            self._end_grace(now, r)
        if not self._armed(now):
            return Reaped((), (), (), ())
        self.reaped = {g: at for g, at in self.reaped.items() if at > now - _REMEMBER_REAPED_MS}
        gateways = [g for lease, g in sorted((lease, g) for g, lease in self.gateways.items()) if lease <= now]
        aborted = [request for g in gateways for request in self._reap_gateway(now, g)]
        leases = [(pool, lease, e) for pool, engines in self.engines.items() for e, lease in engines.items()]
        engines = [(pool, e) for pool, lease, e in sorted(leases) if lease <= now]
        lost: list[str] = []
        for pool, engine in engines:
            del self.engines[pool][engine]
            lost += self.lose_requests(now, pool, engine)
        return Reaped(tuple(e for _, e in engines), tuple(gateways), tuple(lost), tuple(aborted))
