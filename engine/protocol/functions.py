"""The versioned Redis function library `sluice1`, as Python calls.

Each call is one `FCALL`, atomic, all or nothing. The Lua lives in `functions.lua`; `twin.py` is the same in pure Python
and a property test proves them equal. `Functions` works on a sync client, `AsyncFunctions` on an asyncio one (both from
redis-py, `decode_responses=False`). Both load the library when the server lacks it (after a wipe or a fail-over).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from redis.asyncio import Redis as AsyncRedis
from redis.client import Redis
from redis.exceptions import ResponseError

from engine.protocol.keys import Keys

__all__ = [
    "LAYOUT",
    "LIBRARY",
    "Admission",
    "AsyncFunctions",
    "Cancelled",
    "Claim",
    "Functions",
    "Handed",
    "LayoutMismatch",
    "Pull",
    "Pulled",
    "Reaped",
    "Verdict",
]

LAYOUT = "1"
"""Number of the layout of everything under the prefix. Raise it when a key's name, type, fields or meaning changes so
that an older or a newer Sluice would misread it: two layouts never work on one prefix."""

_FOLDER = Path(__file__).parent
_SOURCE = (
    (_FOLDER / "functions.lua")
    .read_text(encoding="utf-8")
    .replace("-- {fair}\n", (_FOLDER / "fair.lua").read_text(encoding="utf-8"))
    .replace("{layout}", LAYOUT)
)
LIBRARY = "sluice1_" + hashlib.sha256(_SOURCE.encode()).hexdigest()[:8]
"""Library and function-name prefix: two versions of Sluice can share a server during a rolling upgrade."""


class LayoutMismatch(ResponseError):
    """The state in Redis was written in another layout: nothing was done, and nothing will be until someone acts."""

    def __init__(self, prefix: str, found: str) -> None:
        super().__init__(
            f"the state under '{prefix}' in Redis has layout {found}, and this Sluice works with layout {LAYOUT}: "
            "let the version that wrote it drain, then remove these keys (docs/operations.md, Upgrading)"
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """An Idempotency-Key: `key` as the client sent it, `digest` of the body."""

    key: str
    digest: str
    ttl_ms: int = 86_400_000


@dataclass(frozen=True, slots=True)
class Admission:
    """Everything `admit` decides on. Limits of -1 mean unlimited. Money is integer nano-units."""

    request: str
    tenant: str
    pool: str
    tier: str
    tier_rank: int
    gateway: str
    generation: int
    """Generation of the principal in the gateway's cache; a newer one in Redis refuses with `stale_principal`."""
    hold_nano: int
    floor_nano: int | None
    """The tenant's balance may not fall below this (credit line, negative); None: postpaid, unlimited."""
    max_concurrent: int
    max_queued_tier: int
    max_queued_tenant: int
    choices: int
    prompt_tokens: int
    lease_ms: int = 3000
    claim: Claim | None = None
    expires_ms: int = 0
    """As in `Work`: wall time after which a still queued request is ended with code `queue_timeout` (0: never)."""
    limits: tuple[tuple[str, int, int, int], ...] = ()
    """Rate limits (name, capacity, refill per minute, cost): token buckets `rl:{tenant}:{name}`."""
    weight: float = 1.0
    """The tenant's share beside other tenants of its tier."""
    ttft_ms: int = 0
    """The tier's target: a request that has waited three quarters of it stands behind those that have not (0: off)."""
    sheddable: bool = False
    """Refuse it (`tier_queue_full`, detail "deadline") when what waits would make it miss `ttft_ms`."""
    ask: str = ""
    """What a gateway needs to go on with this request; empty: it is not resumable."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`code` is "ok" or one of: stale_principal, no_engine, concurrency_limit, rate_limit, tenant_queue_full,
    tier_queue_full, insufficient_quota, idempotency_in_flight, idempotency_conflict, idempotency_replay.

    `stale_principal` with detail "balance": the account is not in Redis (it was wiped); read it from the ledger, call
    `account`, admit again. The detail of an idempotency code is the request id that holds the claim.

    `depth` is the tier's queue depth after (ok) or at (refused) admission; `retry_after_s` from the measured drain rate
    (None: unknown). `detail` names the limit; `limits`: (name, capacity, remaining, reset seconds) of each rate limit.
    """

    code: str
    depth: int = 0
    retry_after_s: int | None = None
    detail: str = ""
    limits: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def ok(self) -> bool:
        return self.code == "ok"


@dataclass(frozen=True, slots=True)
class Pulled:
    """One pulled request: its encoded `Work`, its current epoch, whether its tier's floor admitted it, and whether its
    tenant was light then (`engine.protocol.fair`)."""

    work: bytes
    epoch: int
    by_floor: bool
    light: bool


@dataclass(frozen=True, slots=True)
class Pull:
    works: tuple[Pulled, ...]
    controls: tuple[bytes, ...]
    """Encoded `Control` messages for this engine, each delivered once."""
    accounts: dict[str, float] = field(default_factory=dict)
    """The pool's deficits (`tier`) and, of the tenants of `works`, the counters (`tier:tenant`)."""
    registered: bool = True
    """False: the engine's lease was lost (reaped, or Redis was wiped); it must register again."""


@dataclass(frozen=True, slots=True)
class Handed:
    """What an admission pulled for an engine whose pull stands."""

    pulled: Pulled
    accounts: dict[str, float]
    """As in `Pull`."""

    @classmethod
    def read(cls, message: bytes) -> Handed:
        """From the engine's channel: a line of JSON, then the work. Raises ValueError or KeyError."""
        line, _, work = message.partition(b"\n")
        head = json.loads(line)
        accounts = {name: float(value) for name, value in head["accounts"].items()} if head["accounts"] else {}
        return cls(Pulled(work, int(head["epoch"]), bool(head["by_floor"]), bool(head["light"])), accounts)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """`was`: "queued" (gone, nothing was computed, hold and slot freed), "running" (order sent), "unknown", or "lost"
    (re-queued after its engine died, now out of the queue: its gateway finishes it with the raised epoch)."""

    was: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """A resumable request that this gateway now owns: its turn, what was asked, whether its outcome is written."""

    turn: int
    ask: str
    told: bool


@dataclass(frozen=True, slots=True)
class Reaped:
    """What `reap` found and did, as ids. It has told the gateways of lost requests itself (error Delta)."""

    dead_engines: tuple[str, ...]
    dead_gateways: tuple[str, ...]
    lost: tuple[str, ...]
    """Requests whose engine died. Their gateway must finish them; where it is dead too, `reap` has."""
    aborted: tuple[str, ...]
    """Requests whose gateway died: cancelled if queued, ordered to stop if running, finished if lost."""


def _strings(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(v.decode() if isinstance(v, bytes) else str(v) for v in values)


def _money(nano: int | None) -> int | str:
    """Functions read an empty string as "no balance given" (a postpaid tenant)."""
    return "" if nano is None else nano


class _Codec:
    """Arguments and answers of each function; shared by the sync and the async caller."""

    @staticmethod
    def admit(a: Admission) -> bytes:
        return msgspec.json.encode(a)

    @staticmethod
    def verdict(raw: bytes) -> Verdict:
        d = msgspec.json.decode(raw)
        return Verdict(
            code=d["code"],
            depth=int(d.get("depth", 0)),
            retry_after_s=d.get("retry_after_s"),
            detail=d.get("detail", ""),
            limits=tuple(tuple(x) for x in d.get("limits", []) or []),
        )

    @staticmethod
    def pull(raw: list[Any]) -> Pull:
        works, controls, accounts = raw
        return Pull(
            works=tuple(Pulled(w[0], int(w[1]), bool(int(w[2])), bool(int(w[3]))) for w in works),
            controls=tuple(controls),
            accounts={k: float(v) for k, v in json.loads(accounts).items()} if accounts else {},
            registered=bool(accounts),
        )

    @staticmethod
    def adopted(raw: list[Any]) -> Adopted | None:
        return Adopted(int(raw[0]), raw[1].decode(), bool(raw[2])) if raw else None

    @staticmethod
    def reaped(raw: list[Any]) -> Reaped:
        return Reaped(*(_strings(part) for part in raw))


class _Library:
    """Name and source of the library; the tests load a variant whose clock they set."""

    library = LIBRARY
    clock = "wall_ms"
    """A Lua expression: a function from the key prefix to milliseconds. Only ever another in tests."""

    @classmethod
    def source(cls) -> str:
        """The Lua source with its placeholders filled."""
        return _SOURCE.replace("{library}", cls.library).replace("{now}", cls.clock)

    @staticmethod
    def refuse_layout(keys: Keys, found: bytes | str | None) -> None:
        """Raise LayoutMismatch for any other than ours; nobody may have written one yet."""
        layout = found.decode() if isinstance(found, bytes) else found
        if layout is not None and layout != LAYOUT:
            raise LayoutMismatch(keys.prefix, layout)

    @staticmethod
    def refined(keys: Keys, error: ResponseError) -> ResponseError:
        """What a function answered: LayoutMismatch if it is that."""
        word, _, found = str(error).partition(" ")
        return LayoutMismatch(keys.prefix, found) if word == "LAYOUT" else error

    @staticmethod
    def missing(error: ResponseError) -> bool:
        """The server lacks the library, so the call took no effect."""
        return "Function not found" in str(error)


class Functions(_Library):
    """Blocking caller (engines, tests, settler tools). Not for the event loop."""

    def __init__(self, redis: Redis, keys: Keys, ask: Callable[..., Any] | None = None) -> None:
        """`ask` sends a command's words and returns the answer; the client does it when it is not given."""
        self.redis, self.keys = redis, keys
        self._ask = ask or redis.execute_command

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return self._once(name, args)
        except ResponseError as error:
            if not self.missing(error):
                raise
        self.load()
        return self._once(name, args)

    def _once(self, name: str, args: tuple[Any, ...]) -> Any:
        try:
            return self._ask("FCALL", f"{self.library}_{name}", 0, self.keys.prefix, *args)
        except ResponseError as error:
            raise self.refined(self.keys, error) from None

    def load(self) -> None:
        """Load the library; harmless when it is there."""
        self.redis.function_load(self.source(), replace=True)

    def check_layout(self) -> None:
        """Raise LayoutMismatch if the state in Redis is of another layout. Every call checks that too, atomically."""
        self.refuse_layout(self.keys, cast("bytes | None", self.redis.get(self.keys.layout)))

    def admit(self, admission: Admission, work: bytes) -> Verdict:
        """Check every dimension, then commit all and enqueue; a refusal consumes nothing."""
        return _Codec.verdict(self._call("admit", _Codec.admit(admission), work))

    def pull(
        self,
        pool: str,
        engine: str,
        credit: Mapping[str, int],
        lease_ms: int = 3000,
        tokens: int = 0,
        known: int | None = None,
    ) -> Pull:
        """Take the next requests: `credit` is sequence slots by tier name, all of them of one room ("+": rows that
        may be kept for light tenants; "+tier": rows that such a tenant of the tier may take from another). Renews the
        engine's lease; an engine whose lease was lost and reaped gets nothing until it registers again. Empty credit
        still renews and reads controls.

        With `tokens`, the room for known tokens, the pull stands: for 0.4 s an admission that finds the engine
        listening to its channel pulls for it, from what is left of both. The next pull replaces that.

        `known`: how many requests that it runs were counted when the credit was; more that Redis knows of are on their
        way, and taken from the credit."""
        credits = json.dumps(dict(credit))
        return _Codec.pull(self._call("pull", pool, engine, credits, lease_ms, tokens, -1 if known is None else known))

    def register(self, pool: str, engine: str, card_hash: str, card: bytes, lease_ms: int = 3000) -> str:
        """Join a pool. "ok", or "card_mismatch" while live engines of the pool serve another card."""
        return str(self._call("register", pool, engine, card_hash, card, lease_ms).decode())

    def leave(self, pool: str, engine: str) -> None:
        """Leave a pool after a drain."""
        self._call("leave", pool, engine)

    def charge(self, pool: str, charges: Sequence[tuple[str, str, float]]) -> None:
        """Book weighted token cost (negative: a refund): counters rise by cost over weight, deficits fall by it."""
        if charges:
            self._call("charge", pool, json.dumps(list(charges)))

    def cancel(self, request: str, reason: str) -> Cancelled:
        """Stop a request wherever it is."""
        return Cancelled(self._call("cancel", request, reason).decode())

    def finish(self, request: str, epoch: int, final: bytes) -> bool:
        """Record the one Final, free the slot, drop the queue entry. False: stale epoch or already ended."""
        return bool(self._call("finish", request, epoch, final))

    def close(self, request: str, tenant: str, balance_nano: int | None, sequence: int) -> bool:
        """After settlement: drop the hold, set the absolute balance if `sequence` is newer, forget the request."""
        return bool(self._call("close", request, tenant, _money(balance_nano), sequence))

    def declare(self, request: str, final: bytes) -> bool:
        """Record a Final whose request went with a wiped Redis. False: its record exists, so `finish` is the way."""
        return bool(self._call("declare", request, final))

    def requeue(self, request: str, epoch: int, work: bytes, max_attempts: int = 3) -> str:
        """Give a lost request back to the queue, at its old place, with the raised epoch. "queued"; "poison" after
        `max_attempts` pulls (dead-lettered: the gateway finishes it); "stale" when not lost or the epoch is old."""
        return str(self._call("requeue", request, epoch, work, max_attempts).decode())

    def account(self, tenant: str, generation: int, balance_nano: int | None, sequence: int) -> bool:
        """Put a tenant's generation and ledger balance in Redis; older generations and sequences change nothing.
        True when the balance was taken."""
        return bool(self._call("account", tenant, generation, _money(balance_nano), sequence))

    def reap(self) -> Reaped:
        """Act on lapsed leases of engines and gateways and on expired queued requests. Call it once a second."""
        return _Codec.reaped(self._call("reap"))

    def adopt(self, request: str, tenant: str, gateway: str) -> Adopted | None:
        """Go on with a resumable request of this tenant; whoever had it is told. None: there is none, or no more."""
        return _Codec.adopted(self._call("adopt", request, tenant, gateway))

    def release(self, request: str, gateway: str, turn: int, how: str) -> str:
        """The owner's client is gone: "park" it for the grace, "drop" it after that, or say that it was "told" the end.
        "ok"; "moved": another owns it; "unknown": it is not kept any more."""
        return str(self._call("release", request, gateway, turn, how).decode())

    def renew(self, gateway: str, lease_ms: int = 3000) -> bool:
        """Renew (or open) a gateway's lease. False: it had lapsed and was reaped; its requests are gone."""
        return bool(self._call("renew", gateway, lease_ms))


class AsyncFunctions(_Library):
    """The same calls for the event loop (gateway, settler)."""

    def __init__(self, redis: AsyncRedis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys

    async def _call(self, name: str, *args: Any) -> Any:
        try:
            return await self._once(name, args)
        except ResponseError as error:
            if not self.missing(error):
                raise
        await self.load()
        return await self._once(name, args)

    async def _once(self, name: str, args: tuple[Any, ...]) -> Any:
        try:
            return await self.redis.fcall(f"{self.library}_{name}", 0, self.keys.prefix, *args)
        except ResponseError as error:
            raise self.refined(self.keys, error) from None

    async def load(self) -> None:
        await self.redis.function_load(self.source(), replace=True)

    async def check_layout(self) -> None:
        self.refuse_layout(self.keys, cast("bytes | None", await self.redis.get(self.keys.layout)))

    async def admit(self, admission: Admission, work: bytes) -> Verdict:
        return _Codec.verdict(await self._call("admit", _Codec.admit(admission), work))

    def admit_command(self, admission: Admission, work: bytes) -> tuple[str | bytes | int, ...]:
        """`admit` as words, for who sends them himself; `verdict` reads the answer. The library may be missing."""
        return "FCALL", f"{self.library}_admit", 0, self.keys.prefix, _Codec.admit(admission), work

    @staticmethod
    def verdict(raw: bytes) -> Verdict:
        """What `admit` answered."""
        return _Codec.verdict(raw)

    async def cancel(self, request: str, reason: str) -> Cancelled:
        return Cancelled((await self._call("cancel", request, reason)).decode())

    async def finish(self, request: str, epoch: int, final: bytes) -> bool:
        return bool(await self._call("finish", request, epoch, final))

    async def close(self, request: str, tenant: str, balance_nano: int | None, sequence: int) -> bool:
        return bool(await self._call("close", request, tenant, _money(balance_nano), sequence))

    async def declare(self, request: str, final: bytes) -> bool:
        return bool(await self._call("declare", request, final))

    async def requeue(self, request: str, epoch: int, work: bytes, max_attempts: int = 3) -> str:
        return str((await self._call("requeue", request, epoch, work, max_attempts)).decode())

    async def account(self, tenant: str, generation: int, balance_nano: int | None, sequence: int) -> bool:
        return bool(await self._call("account", tenant, generation, _money(balance_nano), sequence))

    async def reap(self) -> Reaped:
        return _Codec.reaped(await self._call("reap"))

    async def adopt(self, request: str, tenant: str, gateway: str) -> Adopted | None:
        return _Codec.adopted(await self._call("adopt", request, tenant, gateway))

    async def release(self, request: str, gateway: str, turn: int, how: str) -> str:
        return str((await self._call("release", request, gateway, turn, how)).decode())

    async def renew(self, gateway: str, lease_ms: int = 3000) -> bool:
        return bool(await self._call("renew", gateway, lease_ms))
