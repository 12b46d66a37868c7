"""One Redis subscription per process, fanned out to any number of viewers.

A viewer holds no queue: it asks for whatever is newer than what it has, so a slow one skips snapshots and memory stays
bounded by construction.

I1 `age_s` never shrinks unless a snapshot with another time arrived · I2 no viewer can delay another
"""

from __future__ import annotations

import asyncio
import logging
import time
from weakref import WeakKeyDictionary

import msgspec
from django.conf import settings
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol.keys import Keys
from frontend.history import History
from frontend.snapshot import Snapshot, read

__all__ = ["LiveFeed", "live_feed"]

log = logging.getLogger(__name__)
RETRY_S = 1.0
SILENCE_S = 5.0
"""The publisher speaks once a second; after this long without a word the connection is proved by a ping."""


class LiveFeed:
    """The newest snapshot of this process, its age, and a way to wait for the next one."""

    def __init__(self, redis_url: str, keys: Keys) -> None:
        self.latest: Snapshot | None = None
        self.version = 0
        self.connected = False
        self.unreadable = False
        self.history = History()
        self._redis_url = redis_url
        self._channel = keys.live
        self._received_at_s = 0.0
        self._age_when_received_s = 0.0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float | None:
        """Age of the newest snapshot: what its own clock says on arrival, then monotonic time. None: there is none."""
        if self.latest is None:
            return None
        return self._age_when_received_s + time.monotonic() - self._received_at_s

    def start(self) -> None:
        """Begin listening, once; a listener that ended (it never should) is started again."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen(), name="live-feed")

    async def newer_than(self, version: int, patience_s: float) -> None:
        """Return when there is something newer than `version`, or after `patience_s`."""
        if self.version > version:
            return
        news = self._news
        try:
            async with asyncio.timeout(patience_s):
                await news.wait()
        except TimeoutError:
            return

    def accept(self, data: bytes | str) -> None:
        """Take in one published snapshot. One with the time of the last is no news: old figures must not look fresh."""
        try:
            snapshot = read(data)
        except msgspec.DecodeError as error:
            if not self.unreadable:
                log.warning("live snapshot can't be read: %s", error)
            self.unreadable = True
            return
        self.unreadable = False
        if self.latest is not None and snapshot.at_ms == self.latest.at_ms:
            return
        self.latest = snapshot
        self._received_at_s = time.monotonic()
        # Clocks of two machines may differ a little: a snapshot "from the future" is simply new.
        self._age_when_received_s = max(0.0, time.time() - snapshot.at_ms / 1000)
        self.history.add(snapshot)
        self.version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _listen(self) -> None:
        while True:
            try:
                await self._follow()
            except (RedisError, OSError) as error:
                if self.connected or self.version == 0:
                    log.warning("live feed lost Redis: %s", type(error).__name__)
            self.connected = False
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Subscribe first, read the kept snapshot second: in that order nothing published in between is missed."""
        async with (
            Redis.from_url(self._redis_url, socket_connect_timeout=2, socket_timeout=SILENCE_S) as redis,
            redis.pubsub(ignore_subscribe_messages=True) as channel,
        ):
            await channel.subscribe(self._channel)
            kept = await redis.get(self._channel)
            self.connected = True
            if kept is not None:
                self.accept(kept)
            while True:
                message = await channel.get_message(timeout=SILENCE_S)
                if message is None:
                    await redis.ping()
                elif message["type"] == "message":
                    self.accept(message["data"])


_feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, LiveFeed] = WeakKeyDictionary()


def live_feed() -> LiveFeed:
    """This process's feed (one per event loop), listening."""
    loop = asyncio.get_running_loop()
    feed = _feeds.get(loop)
    if feed is None:
        feed = _feeds[loop] = LiveFeed(settings.REDIS_URL, Keys(settings.SLUICE_REDIS_PREFIX))
    feed.start()
    return feed
