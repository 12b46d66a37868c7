"""The metering worker: threads that settle, record, reap and publish, until told to stop."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from django.conf import settings
from django.db import DatabaseError, connection
from redis.backoff import NoBackoff
from redis.client import Redis
from redis.exceptions import RedisError
from redis.retry import Retry

from engine.protocol.functions import Functions, LayoutMismatch
from engine.protocol.keys import Keys
from engine.protocol.messages import Final, Outcome
from gateway.metering import outcomes
from gateway.metering.live import Live
from gateway.metering.pump import Backoff, Pump
from gateway.metering.refusals import tally
from gateway.metering.streams import GroupReader
from gateway.metering.usage import Settler
from tenants.partitions import ensure_months

__all__ = ["Worker", "readers"]

log = logging.getLogger(__name__)
_REAP_EVERY_S = 0.5
_LIVE_EVERY_S = 1.0
_TALLY_EVERY_S = 1.0
_MONTHS_EVERY_S = 3600.0
PARTITIONED = ("billing_usagerecord", "metering_requestoutcome")


def connect() -> Redis:
    """A client that fails fast: the loops here wait and try again themselves."""
    return Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=10,
        socket_connect_timeout=2,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
    )


def readers(redis: Redis, keys: Keys, member: str) -> tuple[GroupReader, GroupReader]:
    """Readers of the usage and the outcomes stream."""
    return (
        GroupReader(redis, keys.usage, keys.set_aside("usage"), "f", member),
        GroupReader(redis, keys.outcomes, keys.set_aside("outcomes"), "o", member),
    )


class Worker:
    """Runs the loops, each in a thread with its own database connection. One that ends by an error ends the worker."""

    def __init__(self) -> None:
        self.name = f"settler-{os.getpid()}-{secrets.token_hex(3)}"
        self._redis = connect()
        self._keys = Keys(settings.SLUICE_REDIS_PREFIX)
        self._functions = Functions(self._redis, self._keys)
        self._stop = threading.Event()
        self._asked = False
        self._failed: BaseException | None = None

    def stop(self) -> None:
        """End after the batch in hand. Safe in a signal handler, where setting an Event could wait for itself."""
        self._asked = True

    def run(self) -> int:
        """Exit status: 0 when told to stop, 1 when a loop failed, or Redis holds the state of another version."""
        try:
            self._functions.check_layout()
        except LayoutMismatch as error:
            log.critical("%s", error)
            return 1
        except (RedisError, OSError) as error:
            log.warning("metering starts without Redis: %s", error)
        usage, outcome = readers(self._redis, self._keys, self.name)
        settler = Settler(self._redis, self._keys, self.name)
        live = Live(self._redis, self._keys)
        loops: dict[str, Callable[[], object]] = {
            "usage": lambda: Pump(usage, Final, settler.check, settler.commit).run(self._stop),
            "outcomes": lambda: Pump(outcome, Outcome, outcomes.check, outcomes.commit).run(self._stop),
            "reap": lambda: self._every(_REAP_EVERY_S, self._reap),
            "live": lambda: self._every(_LIVE_EVERY_S, live.publish),
            "refusals": lambda: self._every(_TALLY_EVERY_S, self._tally_all),
            "months": lambda: self._every(_MONTHS_EVERY_S, _months),
        }
        threads = [threading.Thread(target=self._guard, args=(name, loop), name=name) for name, loop in loops.items()]
        for thread in threads:
            thread.start()
        log.info("%s runs", self.name)
        while not self._asked and not self._stop.wait(0.1):
            pass
        self._stop.set()
        for thread in threads:
            thread.join()
        log.info("%s stopped", self.name)
        return 1 if self._failed else 0

    def _guard(self, name: str, loop: Callable[[], object]) -> None:
        try:
            loop()
        except BaseException as error:
            log.critical("the %s loop ended", name, exc_info=True)
            self._failed = error
        finally:
            connection.close()
            self._stop.set()

    def _every(self, seconds: float, act: Callable[[], object]) -> None:
        """Call at a steady rate; wait longer while a server is away."""
        backoff, due = Backoff(), time.monotonic()
        while not self._stop.is_set():
            try:
                act()
            except LayoutMismatch:
                raise
            except (RedisError, DatabaseError, OSError) as error:
                log.warning("%s waits: %s", threading.current_thread().name, str(error).strip())
                connection.close()
                backoff.wait(self._stop)
                due = time.monotonic()
                continue
            backoff.reset()
            due = max(due + seconds, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _reap(self) -> None:
        found = self._functions.reap()
        for engine in found.dead_engines:
            log.warning("engine %s is gone", engine)
        for gateway in found.dead_gateways:
            log.warning("gateway %s is gone", gateway)
        if found.lost or found.aborted:
            log.warning(
                "requests lost with their engine: %d, ended with their gateway: %d", len(found.lost), len(found.aborted)
            )

    def _tally_all(self) -> None:
        while tally(self._redis, self._keys) and not self._stop.is_set():
            pass


def _months() -> None:
    for table in PARTITIONED:
        for name in ensure_months(table):
            log.info("partition %s created", name)
