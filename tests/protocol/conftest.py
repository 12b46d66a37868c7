"""The function library with a clock that the test sets."""

from __future__ import annotations

import pytest
from redis import Redis

from engine.protocol.functions import LIBRARY, Functions
from engine.protocol.keys import Keys


class ClockedFunctions(Functions):
    """The same source, loaded under another name, reading its time from a key. Production's text has no such way in."""

    library = f"{LIBRARY}_clocked"
    clock = "function(p) return tonumber(redis.call('GET', p .. 'test_now')) end"

    @classmethod
    def source(cls) -> str:
        """Nothing lapses by the server's own clock, which goes on while a slow machine runs a test."""
        return super().source().replace("'PEXPIRE'", "'EXISTS'")

    def set_clock(self, now_ms: int) -> None:
        self.redis.set(f"{self.keys.prefix}test_now", now_ms)


@pytest.fixture
def functions(redis: Redis, redis_prefix: str) -> ClockedFunctions:
    """At 1,000,000 ms, with the detector of lapsed leases armed long ago."""
    f = ClockedFunctions(redis, Keys(redis_prefix))
    f.set_clock(1_000_000)
    return f
