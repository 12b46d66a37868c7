"""The versioned Redis function library `sluice1`, as Python calls.

Each call is one `FCALL`, atomic, all or nothing. The Lua lives in `functions.lua`; `twin.py` is the same in pure Python and a
property test proves them equal. `Functions` works on a sync client, `AsyncFunctions` on an asyncio one (both from redis-py,
`decode_responses=False`). Both load the library when the server does not have it (after a wipe or a fail-over).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis as AsyncRedis
from redis.client import Redis
from redis.exceptions import ResponseError

from engine.protocol.keys import Keys

__all__ = [
    "LIBRARY",
    "Admission",
    "AsyncFunctions",
    "Cancelled",
    "Claim",
    "Functions",
    "Pulled",
    "Reaped",
    "Verdict",
]

_SOURCE = (Path(__file__).parent / "functions.lua").read_text(encoding="utf-8")
LIBRARY = "sluice1_" + hashlib.sha256(_SOURCE.encode()).hexdigest()[:8]
"""Library and function-name prefix: two versions of Sluice can share a server during a rolling upgrade."""


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
    """Generation of the principal that the gateway's cache holds; a newer one in Redis refuses with `stale_principal`."""
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
    limits: tuple[tuple[str, int, int, int], ...] = ()
    """Rate limits (name, capacity, refill per minute, cost): token buckets `rl:{tenant}:{name}`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`code` is "ok" or one of: stale_principal, no_engine, concurrency_limit, rate_limit, tenant_queue_full,
    tier_queue_full, insufficient_quota, idempotency_in_flight, idempotency_conflict, idempotency_replay.

    `depth` is the tier's queue depth after (ok) or at (refused) admission; `retry_after_s` from the measured drain rate
    (None: unknown). `detail` names the limit; `limits` is (name, capacity, remaining, reset seconds) of each rate limit.
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
    """One pulled request: its encoded `Work`, its current epoch, and whether its tier's floor admitted it."""

    work: bytes
    epoch: int
    by_floor: bool


@dataclass(frozen=True, slots=True)
class Pull:
    works: tuple[Pulled, ...]
    controls: tuple[bytes, ...]
    """Encoded `Control` messages for this engine, each delivered once."""
    accounts: dict[str, float] = field(default_factory=dict)
    """Deficits (`tier`) and counters (`tier:tenant`) of the pool after the pull."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """`was`: "queued" (gone, nothing was computed, hold and slot freed), "running" (order sent) or "unknown"."""

    was: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """What `reap` found. Each is (request, gateway): told to the gateway through a `lost` Delta by the function itself."""

    dead_engines: tuple[str, ...]
    dead_gateways: tuple[str, ...]
    lost: tuple[str, ...]
    """Requests whose engine died (their gateway now owns finishing them)."""
    aborted: tuple[str, ...]
    """Requests whose gateway died: cancelled if queued, ordered to stop if running."""


def _strings(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(v.decode() if isinstance(v, bytes) else str(v) for v in values)


class _Codec:
    """Arguments and answers of each function; shared by the sync and the async caller."""

    @staticmethod
    def admit(a: Admission) -> str:
        return json.dumps(asdict(a), separators=(",", ":"))

    @staticmethod
    def verdict(raw: bytes) -> Verdict:
        d = json.loads(raw)
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
            works=tuple(Pulled(work=w[0], epoch=int(w[1]), by_floor=bool(int(w[2]))) for w in works),
            controls=tuple(controls),
            accounts={k: float(v) for k, v in json.loads(accounts).items()} if accounts else {},
        )

    @staticmethod
    def reaped(raw: list[Any]) -> Reaped:
        return Reaped(*(_strings(part) for part in raw))


class Functions:
    """Blocking caller (engines, tests, settler tools). Not for the event loop."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return self.redis.fcall(f"{LIBRARY}_{name}", 0, self.keys.prefix, *args)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
            self.load()
            return self.redis.fcall(f"{LIBRARY}_{name}", 0, self.keys.prefix, *args)

    def load(self) -> None:
        """Load the library; harmless when it is there."""
        self.redis.function_load(_library(), replace=True)

    def admit(self, admission: Admission, work: bytes) -> Verdict:
        """Check every dimension, then commit all and enqueue; a refusal consumes nothing."""
        return _Codec.verdict(self._call("admit", _Codec.admit(admission), work))

    def pull(self, pool: str, engine: str, credit: Mapping[str, int], lease_ms: int = 3000) -> Pull:
        """Take the next requests: `credit` is sequence slots by tier name. Renews the engine's lease; an engine whose
        lease was lost and reaped gets nothing until it registers again. Empty credit still renews and reads controls."""
        return _Codec.pull(self._call("pull", pool, engine, json.dumps(dict(credit)), lease_ms))

    def register(self, pool: str, engine: str, card_hash: str, card: bytes, lease_ms: int = 3000) -> str:
        """Join a pool. "ok", or "card_mismatch" while live engines of the pool serve another card."""
        return str(self._call("register", pool, engine, card_hash, card, lease_ms).decode())

    def leave(self, pool: str, engine: str) -> None:
        """Leave a pool after a drain."""
        self._call("leave", pool, engine)

    def charge(self, pool: str, charges: Sequence[tuple[str, str, float]]) -> None:
        """Add weighted token cost to (tier, tenant) counters and take it from tier deficits."""
        if charges:
            self._call("charge", pool, json.dumps(list(charges)))

    def cancel(self, request: str, reason: str) -> Cancelled:
        """Stop a request wherever it is."""
        return Cancelled(self._call("cancel", request, reason).decode())

    def finish(self, request: str, epoch: int, final: bytes) -> bool:
        """Record the one Final, free the concurrency slot, drop the queue entry. False: stale epoch or already ended."""
        return bool(self._call("finish", request, epoch, final))

    def close(self, request: str, tenant: str, balance_nano: int | None, sequence: int) -> bool:
        """After settlement: drop the hold, set the absolute balance if `sequence` is newer, forget the request."""
        return bool(self._call("close", request, tenant, "" if balance_nano is None else balance_nano, sequence))

    def reap(self, max_attempts: int = 3) -> Reaped:
        """Act on lapsed leases of engines and gateways."""
        return _Codec.reaped(self._call("reap", max_attempts))

    def renew(self, gateway: str, lease_ms: int = 3000) -> bool:
        """Renew (or open) a gateway's lease. False: it had lapsed and was reaped; its requests are gone."""
        return bool(self._call("renew", gateway, lease_ms))


class AsyncFunctions:
    """The same calls for the event loop (gateway, settler)."""

    def __init__(self, redis: AsyncRedis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys

    async def _call(self, name: str, *args: Any) -> Any:
        try:
            return await self.redis.fcall(f"{LIBRARY}_{name}", 0, self.keys.prefix, *args)
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
            await self.load()
            return await self.redis.fcall(f"{LIBRARY}_{name}", 0, self.keys.prefix, *args)

    async def load(self) -> None:
        await self.redis.function_load(_library(), replace=True)

    async def admit(self, admission: Admission, work: bytes) -> Verdict:
        return _Codec.verdict(await self._call("admit", _Codec.admit(admission), work))

    async def cancel(self, request: str, reason: str) -> Cancelled:
        return Cancelled((await self._call("cancel", request, reason)).decode())

    async def finish(self, request: str, epoch: int, final: bytes) -> bool:
        return bool(await self._call("finish", request, epoch, final))

    async def close(self, request: str, tenant: str, balance_nano: int | None, sequence: int) -> bool:
        return bool(await self._call("close", request, tenant, "" if balance_nano is None else balance_nano, sequence))

    async def reap(self, max_attempts: int = 3) -> Reaped:
        return _Codec.reaped(await self._call("reap", max_attempts))

    async def renew(self, gateway: str, lease_ms: int = 3000) -> bool:
        return bool(await self._call("renew", gateway, lease_ms))


def _library() -> str:
    """The Lua source under its versioned library name; `{library}` in the file stands for it."""
    return _SOURCE.replace("{library}", LIBRARY)
