"""The price a hold is computed with: the version in force, as it was read up to 20 seconds ago."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from django.db import Error as DatabaseError

from tenants.billing.rating import PriceFacts

__all__ = ["Prices"]

log = logging.getLogger(__name__)

_FRESH_S = 10.0
"""Age at which a price is read again, while requests go on with the old one."""
_STALE_S = 20.0
"""Age at which they wait for the new one."""
_TIMEOUT_S = 5.0
"""A Postgres that hangs counts as away."""
Find = Callable[[str, datetime], Awaitable[PriceFacts | None]]


class Prices:
    """Cached by price class. While Postgres is away the last price stands: a hold is an estimate, rating is exact."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[str, tuple[PriceFacts | None, float]] = {}
        self._reading: dict[str, asyncio.Task[PriceFacts | None]] = {}

    async def of(self, price_class: str) -> PriceFacts | None:
        """The price in force, or None for a class that has none (nothing is held for it)."""
        known = self._known.get(price_class)
        age_s = time.monotonic() - known[1] if known is not None else _STALE_S
        if known is not None and age_s < _FRESH_S:
            return known[0]
        reading = self._reading.get(price_class)
        if reading is None:
            reading = self._reading[price_class] = asyncio.create_task(self._read(price_class))
            reading.add_done_callback(lambda _: self._reading.pop(price_class, None))
        return known[0] if known is not None and age_s < _STALE_S else await asyncio.shield(reading)

    async def _read(self, price_class: str) -> PriceFacts | None:
        """Once for all who ask meanwhile."""
        known = self._known.get(price_class)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                price = await self._find(price_class, datetime.now(UTC))
        except (DatabaseError, OSError) as error:
            log.warning("price of %s can't be read: %s", price_class, type(error).__name__)
            price = known[0] if known is not None else None
        self._known[price_class] = (price, time.monotonic())
        return price
