"""The models this cell serves: cards by pool, read from Redis where engines publish them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.keys import Keys
from engine.protocol.messages import PROTOCOL_VERSION, ModelCard, decode
from gateway.dispatch.redis import is_away

__all__ = ["Model", "Registry"]

log = logging.getLogger(__name__)

_FRESH_S = 1.0
_EARLY_S = 0.5
"""Age at which it is read again while it still counts: with requests all the time none has to wait for it."""
_MISSING_S = 60.0
"""After a wipe of Redis a pool is gone until its engines register again, which takes about a second."""
_APART_S = 0.2
"""Unknown model names ask Redis again at most this often, and wait for it: a guesser costs little."""


class Model(msgspec.Struct, frozen=True):
    """A pool and its card."""

    pool: str
    card: ModelCard
    live: int
    """Engines of the pool whose lease is running."""


class Registry:
    """A cached view, at most a second old. While Redis is away the last view stands."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._models: dict[str, Model] = {}
        self._names: dict[str, Model] = {}
        self._seen: dict[str, float] = {}
        self._read_at = 0.0
        self._lock = asyncio.Lock()
        self._early: asyncio.Task[None] | None = None

    async def find(self, name: str) -> Model | None:
        """The model of that name or alias."""
        await self._refresh(_FRESH_S)
        if self._early is None and time.monotonic() - self._read_at >= _EARLY_S:
            self._early = asyncio.create_task(self._refresh_early())
        if name not in self._names:
            await self._look_again()
        return self._names.get(name)

    async def all(self) -> list[Model]:
        """All models, by name."""
        await self._refresh(_FRESH_S)
        return [self._models[pool] for pool in sorted(self._models)]

    async def _refresh_early(self) -> None:
        try:
            await self._refresh(_EARLY_S)
        except (RedisError, OSError) as error:
            log.debug("models: %s", error)  # the request that needs them is told
        finally:
            self._early = None

    async def _refresh(self, max_age_s: float) -> None:
        if time.monotonic() - self._read_at < max_age_s:
            return
        async with self._lock:
            if time.monotonic() - self._read_at >= max_age_s:
                await self._read_anew()

    async def _look_again(self) -> None:
        """Have a view that was read after this was asked: "no such model" is said of now, not of a moment ago."""
        asked = time.monotonic()
        async with self._lock:
            if self._read_at < asked:
                await asyncio.sleep(self._read_at + _APART_S - asked)
                await self._read_anew()

    async def _read_anew(self) -> None:
        began = time.monotonic()
        try:
            await self._read()
        except (RedisError, OSError) as error:
            if not self._models or not is_away(error):
                raise
            log.warning("models are as they were last seen: %s", error)
        self._read_at = began

    async def _read(self) -> None:
        published = cast("dict[bytes, bytes]", await self._redis.hgetall(self._keys.pools))
        hashes = {pool.decode(): card.decode() for pool, card in published.items()}
        pools = sorted(hashes)
        now_ms = int(time.time() * 1000)
        pipe = self._redis.pipeline(transaction=False)
        for pool in pools:
            pipe.zcount(self._keys.engines(pool), now_ms, "+inf")
            known = self._models.get(pool)
            if known is None or known.card.hash != hashes[pool]:
                pipe.get(self._keys.card(pool))
        answers = iter(await pipe.execute())
        models: dict[str, Model] = {}
        for pool in pools:
            live = int(next(answers))
            known = self._models.get(pool)
            card = known.card if known is not None and known.card.hash == hashes[pool] else _card(next(answers))
            if card is not None and card.protocol == PROTOCOL_VERSION:
                models[pool] = Model(pool, card, live)
        self._keep_missing(models)
        self._models = models
        self._names = {alias: m for m in models.values() for alias in m.card.aliases}
        self._names |= {m.card.model: m for m in models.values()} | models

    def _keep_missing(self, models: dict[str, Model]) -> None:
        """A pool that vanished stays known a while, without engines: "try again" is true, "no such model" is not."""
        now = time.monotonic()
        self._seen |= dict.fromkeys(models, now)
        for pool, known in self._models.items():
            if pool not in models and now - self._seen[pool] < _MISSING_S:
                models[pool] = Model(pool, known.card, 0)


def _card(raw: bytes | None) -> ModelCard | None:
    return decode(raw, ModelCard) if raw else None
