"""Failed sign-ins, counted in Redis so that all console processes share one count."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass

from django.conf import settings
from redis import Redis
from redis.exceptions import RedisError

__all__ = ["Throttle"]

log = logging.getLogger(__name__)
WINDOW_S = 300
BY_ADDRESS_AND_NAME = 5
BY_ADDRESS = 30
BY_NAME = 60
"""From all addresses together: high, because it lets a stranger lock the name's owner out."""

_local: dict[str, tuple[int, float]] = {}
"""Used only while Redis is away: an operator must get in during an outage, a guesser must not guess freely."""


@dataclass(frozen=True, slots=True)
class Throttle:
    """The attempts of one address at one name, each counted before the password is looked at: a burst can't slip by."""

    address: str
    name: str

    def blocked_for_s(self) -> int:
        """Count one attempt. 0: it may go on; otherwise whole seconds until the next may."""
        waits = [wait for key, limit in self._limits() if (wait := _count(key, limit))]
        return max(waits, default=0)

    def forget(self) -> None:
        """After a success: this address knows this name's password, so its slips, and this attempt, are no attack."""
        both, *others = (key for key, _ in self._limits())
        _local.pop(both, None)
        try:
            with _redis() as redis, redis.pipeline(transaction=True) as pipe:
                pipe.delete(both)
                for key in others:
                    pipe.decr(key)
                    pipe.expire(key, WINDOW_S, nx=True)
                pipe.execute()
        except (RedisError, OSError) as error:
            log.warning("sign-in count not cleared: %s", type(error).__name__)

    def _limits(self) -> list[tuple[str, int]]:
        name = self.name.strip().casefold()
        return [
            (_key("both", self.address, name), BY_ADDRESS_AND_NAME),
            (_key("address", self.address), BY_ADDRESS),
            (_key("name", name), BY_NAME),
        ]


def _key(kind: str, *parts: str) -> str:
    # Hashed: what people type into a name field is sometimes their password.
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return f"{settings.SLUICE_REDIS_PREFIX}signin:{kind}:{digest}"


def _redis() -> Redis:
    return Redis.from_url(settings.REDIS_URL, socket_connect_timeout=1, socket_timeout=1)


def _count(key: str, limit: int) -> int:
    try:
        # The window opens with its first attempt and ends by itself; later ones don't prolong it.
        with _redis() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.set(key, 0, ex=WINDOW_S, nx=True)
            pipe.incr(key)
            pipe.ttl(key)
            _, used, left_s = pipe.execute()
    except (RedisError, OSError) as error:
        log.warning("sign-in attempts counted locally: %s", type(error).__name__)
        used, left_s = _count_locally(key)
    return max(1, left_s) if used > limit else 0


def _count_locally(key: str) -> tuple[int, int]:
    now = time.monotonic()
    for old in [name for name, (_, ends) in _local.items() if ends <= now]:
        del _local[old]
    used, ends = _local.get(key, (0, now + WINDOW_S))
    _local[key] = (used + 1, ends)
    return used + 1, int(ends - now)
