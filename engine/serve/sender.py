"""The thread that brings tokens out: one stream entry per step and gateway, then finals, then events and charges."""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from engine.protocol.functions import Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import encode
from engine.serve.link import Broken, Direct, Link, Parcel
from engine.serve.log import Log

__all__ = ["Sender"]

_REPLIES_LENGTH = 65_536
"""A gateway that renews its lease but doesn't read may not fill Redis; it sees the gap in the indexes."""
_KEPT_LENGTH = 65_536
_KEPT_OPEN_MS = 3_600_000
"""While the request is open; its end shortens it."""
_EVENTS_LENGTH = 200_000
_CHARGE_S = 0.2
_LAST_TRIES = 3
_KEEP_S = 900.0
_KEEP_COUNT = 4096
"""Accepted finals are kept so long (and so many), to be told again if Redis loses its data before they are settled."""


class Sender(threading.Thread):
    """Delivers parcels in order; while Redis is away it keeps them and tries again. The loop never waits for it."""

    def __init__(self, redis: Redis, keys: Keys, pool: str, link: Link, log: Log) -> None:
        super().__init__(name="sender", daemon=True)
        self.redis: Any = redis  # redis-py's annotations allow str where bytes come
        self.keys, self.pool, self.link, self.log = keys, pool, link, log
        self._direct = Direct(redis)
        self.functions = Functions(redis, keys, self._direct.ask)
        self._queue: SimpleQueue[Parcel | None] = SimpleQueue()  # a `Queue` takes as long to wake as the sending takes
        self._left = 0
        """Parcels that were handed over and are not delivered yet; only with the lock of `_done`."""
        self._done = threading.Condition()
        self.accepted: deque[tuple[float, str, bytes]] = deque(maxlen=_KEEP_COUNT)
        self.undelivered = 0
        """Finals in the parcel that is being delivered."""
        self._stop = False
        self._era = b""
        self._charges: dict[tuple[str, str], float] = {}
        self._charge_at = 0.0

    def send(self, parcel: Parcel) -> None:
        with self._done:
            self._left += 1
        self._queue.put(parcel)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything handed over is delivered. False: it was not in time."""
        with self._done:
            return self._done.wait_for(lambda: self._left == 0, timeout_s)

    def stop(self) -> None:
        self._stop = True
        self._queue.put(None)

    def run(self) -> None:
        try:
            while not (self._stop and self._queue.empty()):
                parcel, parts = self._collect()
                self._deliver_all(parcel)
                with self._done:
                    self._left -= parts
                    self._done.notify_all()
        except Exception as error:  # what can't be delivered must not pile up unseen
            self.link.inbox.put(Broken(f"sender: {type(error).__name__}: {error}"[:300]))

    def _deliver_all(self, parcel: Parcel) -> None:
        """Try until it is delivered, or until the process is ending and Redis stays away."""
        self.undelivered = len(parcel.finals)
        failures = 0
        while not self._deliver(parcel, failures):
            failures += 1
            if self._stop and failures > _LAST_TRIES:
                return
            time.sleep(min(1.0, 0.05 * 2**failures))
        self.undelivered = 0

    def _collect(self) -> tuple[Parcel, int]:
        """The next parcel and all that are already behind it, as one; and how many those were."""
        whole, parts = Parcel(), 0
        try:
            part = self._queue.get(timeout=_CHARGE_S)
            while True:
                if part is not None:
                    parts += 1
                    _merge(whole, part)
                part = self._queue.get_nowait()
        except Empty:
            return whole, parts

    def _deliver(self, parcel: Parcel, failures: int) -> bool:
        try:
            self._replies(parcel)
            self._finals(parcel)
            if parcel.events:
                fields: Any = {"e": encode(parcel.events)}
                self.redis.xadd(self.keys.events, fields, maxlen=_EVENTS_LENGTH, approximate=True)
                parcel.events = []
            self._charge(parcel)
            return True
        except RedisError as error:
            if failures == 0:
                self.log.warning("replies_wait", error=type(error).__name__, detail=str(error)[:200])
            return False

    def _replies(self, parcel: Parcel) -> None:
        """No new stream is made for a gateway: it makes its own with its lease, and the reaper takes it away."""
        if not parcel.deltas:
            return
        commands: list[tuple[str | bytes | int | float, ...]] = []
        for gateway, deltas in parcel.deltas.items():
            stream, most = self.keys.replies(gateway), ("MAXLEN", "~", _REPLIES_LENGTH)
            commands.append(("XADD", stream, "NOMKSTREAM", *most, "*", "d", encode(deltas)))
        for request, deltas in parcel.kept.items():
            # Here and not by the gateway: what it has not passed on yet must outlive it.
            stream, most = self.keys.out(request), ("MAXLEN", "~", _KEPT_LENGTH)
            commands.append(("XADD", stream, *most, "*", "d", encode(deltas)))
            commands.append(("PEXPIRE", stream, _KEPT_OPEN_MS))
        self._direct.ask_all(commands)
        parcel.deltas, parcel.kept = {}, {}

    def _finals(self, parcel: Parcel) -> None:
        while parcel.finals:
            request, epoch, era, final = parcel.finals[0]
            if not self.functions.finish(request, epoch, final):
                self._unfinished(request, era, final)
            self.accepted.append((time.monotonic(), request, final))
            self.link.known.discard(request)
            parcel.finals.pop(0)
            self.undelivered = len(parcel.finals)

    def _unfinished(self, request: str, era: bytes, final: bytes) -> None:
        """Redis doesn't know it in this epoch: either somebody else ended it, or its record went with a wipe."""
        if self.redis.get(self.keys.era) == era:
            self.log.info("final_stale", request=request)
        elif self.functions.declare(request, final):
            self.log.info("final_declared", request=request)

    def _charge(self, parcel: Parcel) -> None:
        for account, cost in parcel.charges.items():
            self._charges[account] = self._charges.get(account, 0.0) + cost
        parcel.charges = {}
        now = time.monotonic()
        if now < self._charge_at:
            return
        self._charge_at = now + _CHARGE_S
        if self._charges:
            self.functions.charge(self.pool, [(tier, tenant, cost) for (tier, tenant), cost in self._charges.items()])
            self._charges = {}
        self._watch_era(now)

    def _watch_era(self, now: float) -> None:
        """After a wipe, tell the recent finals again: settlement is by request id, so a second telling is harmless."""
        era = self.redis.get(self.keys.era) or b""
        while self.accepted and now - self.accepted[0][0] > _KEEP_S:
            self.accepted.popleft()
        if era and self._era and era != self._era:
            for _, request, final in list(self.accepted):
                self.functions.declare(request, final)
            self.log.warning("finals_declared_again", count=len(self.accepted))
        self._era = era or self._era


def _merge(whole: Parcel, part: Parcel) -> None:
    for gateway, deltas in part.deltas.items():
        whole.deltas.setdefault(gateway, []).extend(deltas)
    for request, deltas in part.kept.items():
        whole.kept.setdefault(request, []).extend(deltas)
    whole.finals += part.finals
    whole.events += part.events
    for account, cost in part.charges.items():
        whole.charges[account] = whole.charges.get(account, 0.0) + cost
