"""From an API key to a principal: cached, invalidated by publication and generation, usable while Postgres is away."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from django.db import Error as DatabaseError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.keys import Keys
from gateway.errors import ApiError
from tenants import keys as key_text
from tenants.principals import Principal

__all__ = ["Identity"]

log = logging.getLogger(__name__)

FRESH_S = 30.0
"""Age at which a cached principal is read again. A change is published and seen at once; this is for a lost message."""
EARLY_S = 20.0
"""Age at which it is read again while it still counts: with requests all the time none has to wait for it."""
OUTAGE_S = 900.0
"""While Postgres is away a cached principal works this long after it was last read."""
UNKNOWN_S = 10.0
"""A key id that does not exist is not looked up again for this long."""
_MAX_ENTRIES = 50_000
_MAX_LOOKUPS = 4
"""Concurrent database reads: a flood of guessed ids queues here, not in Postgres."""

Find = Callable[[str], Awaitable[tuple[Principal, bytes] | None]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """`found` is None for an id that does not exist. `read_at` is monotonic."""

    found: tuple[Principal, bytes] | None
    read_at: float


class Identity:
    """The cache in front of the record. Keyed by the public id alone; the secret is compared on every use."""

    def __init__(self, find: Find, pepper: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._find, self._pepper, self._clock = find, pepper, clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._reading: dict[str, asyncio.Task[_Entry]] = {}
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)
        self._era = 0
        self.lookups = 0

    async def authenticate(self, authorization: str | None) -> Principal:
        """The principal of an Authorization header, or `ApiError` 401 / 403 / 503."""
        if not authorization:
            raise ApiError(
                "missing_api_key", "You didn't provide an API key. Send it as: Authorization: Bearer YOUR_KEY."
            )
        scheme, _, token = authorization.partition(" ")
        parsed = key_text.parse(token.strip()) if scheme.lower() == "bearer" else None
        if parsed is None:
            raise _wrong_key()
        public_id, secret = parsed
        entry = await self._entry(public_id)
        # The digest is made and compared also for an unknown id, so that time tells nothing of which ids exist.
        stored = entry.found[1] if entry.found else hashlib.sha256(public_id.encode()).digest()
        if not key_text.matches(secret, self._pepper, stored) or entry.found is None:
            raise _wrong_key()
        principal = entry.found[0]
        if principal.expires_ms is not None and principal.expires_ms <= time.time() * 1000:
            raise ApiError("api_key_expired", "This API key has expired.")
        if not principal.active:
            raise ApiError("invalid_api_key", "This API key is not active.")
        return principal

    async def refresh(self, principal: Principal) -> Principal:
        """Read the principal again because Redis knows a newer generation."""
        self.invalidate(principal.tenant)
        entry = await self._entry(principal.key_id)
        if entry.found is None or not entry.found[0].active:
            raise _wrong_key()
        return entry.found[0]

    def invalidate(self, tenant: str | None = None) -> None:
        """Forget one tenant's principals, or all (None); ids remembered as unknown are forgotten either way."""
        self._era += 1
        self._entries = OrderedDict(
            (public_id, entry)
            for public_id, entry in self._entries.items()
            if tenant is not None and entry.found is not None and entry.found[0].tenant != tenant
        )

    async def _entry(self, public_id: str) -> _Entry:
        entry = self._entries.get(public_id)
        now = self._clock()
        if entry is not None and now - entry.read_at < (FRESH_S if entry.found else UNKNOWN_S):
            if entry.found and now - entry.read_at >= EARLY_S:
                self._start_reading(public_id)
            return entry
        try:
            return await asyncio.shield(self._start_reading(public_id))
        except (DatabaseError, OSError, TimeoutError) as error:
            if entry is not None and entry.found is not None and now - entry.read_at < OUTAGE_S:
                return entry
            log.error("principals can't be read: %s", type(error).__name__)
            raise ApiError("identity_unavailable", "Your key can't be checked right now.", retry_after_s=5) from None

    def _start_reading(self, public_id: str) -> asyncio.Task[_Entry]:
        """One read of a key at a time, whoever waits for it."""
        task = self._reading.get(public_id)
        if task is None:
            task = self._reading[public_id] = asyncio.create_task(self._read(public_id))
            task.add_done_callback(lambda done: self._has_read(public_id, done))
        return task

    def _has_read(self, public_id: str, task: asyncio.Task[_Entry]) -> None:
        self._reading.pop(public_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("reading a principal: %s", type(error).__name__)  # who waits for it is told

    async def _read(self, public_id: str) -> _Entry:
        era = self._era
        async with self._lookups:
            self.lookups += 1
            asked = self._clock()  # what the answer says may have changed since
            async with asyncio.timeout(5):
                entry = _Entry(await self._find(public_id), asked)
        if era == self._era:  # else it changed while it was read: use it once, don't keep it
            self._entries[public_id] = entry
            self._entries.move_to_end(public_id)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        return entry

    async def watch(self, redis: Redis, keys: Keys) -> None:
        """Follow the invalidation channel until cancelled. While it can't be heard, everything is read again."""
        while True:
            try:
                async with redis.pubsub() as channel:
                    await channel.subscribe(keys.invalidate)
                    self.invalidate()
                    while True:
                        message = await channel.get_message(ignore_subscribe_messages=True, timeout=1.0)
                        if message is not None:
                            self.invalidate(message["data"].decode())
            except (RedisError, OSError) as error:
                log.warning("invalidation channel: %s", error)
                await asyncio.sleep(0.5)


def check_address(principal: Principal, address: str | None) -> None:
    """Refuse a client outside the key's IP ranges."""
    if not principal.ip_ranges:
        return
    try:
        client = ipaddress.ip_address(address or "")
    except ValueError:
        client = None
    if client is None or not any(client in ipaddress.ip_network(r, strict=False) for r in principal.ip_ranges):
        raise ApiError("ip_not_allowed", "This API key may not be used from your address.")


def check_scope(principal: Principal, scope: str) -> None:
    """Refuse a key that was not given `scope`."""
    if scope not in principal.scopes:
        raise ApiError("scope_not_allowed", f"This API key lacks the scope '{scope}'.")


def _wrong_key() -> ApiError:
    return ApiError("invalid_api_key", "Incorrect API key provided.")
