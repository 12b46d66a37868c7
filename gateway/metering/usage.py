"""The usage stream: each Final is settled in Postgres, then closed in Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from django.utils import timezone
from redis.client import Redis

from engine.protocol.events import Event, Kind
from engine.protocol.functions import Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import Final, ModelCard, decode, encode
from gateway.metering.marks import mark
from tenants.billing.models import ServedModel
from tenants.billing.settle import Settled, Unreadable, check, settle
from tenants.models import Tenant

__all__ = ["KEEP_EVENTS", "Settler"]

log = logging.getLogger(__name__)
KEEP_EVENTS = 200_000
_CARD_AGE_S = 30.0


class Settler:
    """Commits Finals; used by one thread."""

    def __init__(self, redis: Redis, keys: Keys, source: str) -> None:
        self._redis, self._keys, self._source = redis, keys, source
        self._functions = Functions(redis, keys)
        self._classes: dict[str, tuple[float, str]] = {}

    check = staticmethod(check)

    def commit(self, finals: Sequence[Final]) -> None:
        """Settle, then let Redis forget the requests. Redelivered ones are only closed again (I3, M1)."""
        slugs = {final.tenant for final in finals}
        unknown = slugs - set(Tenant.objects.filter(slug__in=slugs).values_list("slug", flat=True))
        if unknown:
            raise Unreadable(f"unknown tenant: {', '.join(sorted(unknown))}")
        settled = settle(finals, {pool: self._price_class(pool) for pool in {f.pool for f in finals}}, mark)
        for x in settled:
            self._functions.close(x.request, x.tenant, x.balance_nano, x.sequence)
        self._emit(finals, settled)

    def _price_class(self, pool: str) -> str:
        """Of the pool's card; of the record when Redis has lost the card; else the pool's name."""
        known = self._classes.get(pool)
        if known and time.monotonic() - known[0] < _CARD_AGE_S:
            return known[1]
        name = self._card_class(pool)
        if name is not None:
            ServedModel.objects.update_or_create(pool=pool, defaults={"price_class": name, "seen_at": timezone.now()})
        else:
            row = ServedModel.objects.filter(pool=pool).first()
            name = row.price_class if row else pool
        self._classes[pool] = (time.monotonic(), name)
        return name

    def _card_class(self, pool: str) -> str | None:
        """None without a card, or with one that can't be read: a bad card must not hold up what is owed."""
        raw: Any = self._redis.get(self._keys.card(pool))
        if raw is None:
            return None
        try:
            return decode(raw, ModelCard).price_class
        except msgspec.MsgspecError as error:
            log.error("the card of pool %s can't be read: %s", pool, error)
            return None

    def _emit(self, finals: Sequence[Final], settled: Iterable[Settled]) -> None:
        now_ms = int(time.time() * 1000)
        events = []
        for final, x in zip(finals, settled, strict=True):
            if not x.new:
                continue
            facts: dict[str, str | int | float | bool | None] = {
                "money": None if x.money is None else str(x.money),
                "currency": x.currency,
                "prompt_tokens": final.prompt_tokens,
                "cached_tokens": final.cached_tokens,
                "completion_tokens": final.completion_tokens,
            }
            who = (self._source, final.tenant, final.tier, final.pool)
            events.append(Event(final.request, Kind.SETTLED.value, now_ms, 0.0, *who, facts))
            events.append(Event(final.request, Kind.CLOSED.value, now_ms, 0.0, *who))
        if events:
            self._redis.xadd(self._keys.events, {"e": encode(events)}, maxlen=KEEP_EVENTS, approximate=True)
