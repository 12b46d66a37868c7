"""The price a hold is computed with: the version in force now, cached for a few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from django.db import Error as DatabaseError

from tenants.billing.rating import PriceFacts

__all__ = ["Prices"]

log = logging.getLogger(__name__)

_FRESH_S = 10.0
Find = Callable[[str, datetime], Awaitable[PriceFacts | None]]


class Prices:
    """Cached by price class. While Postgres is away the last price stands: a hold is an estimate, rating is exact."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[str, tuple[PriceFacts | None, float]] = {}

    async def of(self, price_class: str) -> PriceFacts | None:
        """The price in force, or None for a class that has none (nothing is held for it)."""
        known = self._known.get(price_class)
        if known is not None and time.monotonic() - known[1] < _FRESH_S:
            return known[0]
        try:
            price = await self._find(price_class, datetime.now(UTC))
        except (DatabaseError, OSError) as error:
            log.warning("price of %s can't be read: %s", price_class, type(error).__name__)
            price = known[0] if known is not None else None
        self._known[price_class] = (price, time.monotonic())
        return price
