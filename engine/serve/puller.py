"""The threads that bring work: one keeps the lease, pulls and sends heartbeats, one sleeps on the wake lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from engine.protocol.functions import Functions, LayoutMismatch, Pulled
from engine.protocol.keys import Keys
from engine.protocol.messages import (
    Control,
    Delta,
    Final,
    Heartbeat,
    ModelCard,
    Timeline,
    Work,
    decode,
    encode,
)
from engine.serve.link import Abandoned, Accounted, Arrived, Broken, Direct, DrainOrdered, Link, Refused
from engine.serve.log import Log

__all__ = ["Listener", "Puller"]

_RENEW_S = 0.25
"""Longest time between two pulls: an eighth of the default lease."""
_SETTLING_S = 0.02
"""The same while the listener may not have noticed yet that there is room again."""
_HEARTBEAT_S = 1.0
_HEARTBEAT_TTL_MS = 30_000
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_LISTEN_S = 0.2


class Puller(threading.Thread):
    """Registers, pulls while there is credit, renews the lease four times a second, beats once a second."""

    def __init__(
        self, redis: Redis, keys: Keys, card: ModelCard, engine: str, pool: str, lease_ms: int, link: Link, log: Log
    ) -> None:
        super().__init__(name="puller", daemon=True)
        self.redis: Any = redis  # redis-py's annotations allow str where bytes come
        self.keys, self.link, self.log = keys, link, log
        self.functions = Functions(redis, keys, Direct(redis).ask)
        self.card, self.engine, self.pool, self.lease_ms = card, engine, pool, lease_ms
        self.heartbeat: Callable[[], Heartbeat] | None = None
        self.era = b""
        self.registered = threading.Event()
        self.stopped = threading.Event()
        self._recover = False
        self._beat_at = 0.0

    def run(self) -> None:
        failures = 0
        while not self.stopped.is_set():
            try:
                self._turn()
                if failures:
                    self.log.info("redis_back", after_failures=failures)
                failures = 0
            except LayoutMismatch as error:
                self.link.inbox.put(Refused(str(error)))
                return
            except RedisError as error:
                if failures == 0:
                    self.log.warning("redis_away", error=type(error).__name__, detail=str(error)[:200])
                self._recover = True  # works may have been handed out in an answer that never arrived
                self.stopped.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            except Exception as error:  # an engine that can't pull must not look alive
                self.link.inbox.put(Broken(f"puller: {type(error).__name__}: {error}"[:300]))
                return

    def stop(self) -> None:
        self.stopped.set()
        self.link.nudge.set()

    def _turn(self) -> None:
        if not self.registered.is_set() and not self._register():
            return
        self.link.nudge.wait(_SETTLING_S if self.link.spare and not self.link.hungry else _RENEW_S)
        self.link.nudge.clear()
        if self.stopped.is_set():
            return
        leaving = self.link.quiet.is_set() and not self.link.withdrawn.is_set()
        self._pull()
        if (self._recover or leaving) and self.registered.is_set():
            recover, self._recover = self._recover, False
            try:
                self._recover_lost_answers(recover)
            except RedisError:
                self._recover = recover
                raise
        if leaving:
            self.link.withdrawn.set()
            self.link.inbox.put(None)
        if time.monotonic() >= self._beat_at:
            self._beat()

    def _register(self) -> bool:
        answer = self.functions.register(self.pool, self.engine, self.card.hash, encode(self.card), self.lease_ms)
        if answer != "ok":
            sentence = (
                f"pool {self.pool} is served with another model card than {self.card.model} ({self.card.hash[:12]}): "
                "use another --pool, or stop its engines first"
            )
            self.link.inbox.put(Refused(sentence))
            self.stopped.set()
            return False
        self.era = self.redis.get(self.keys.era) or b""
        self._read_tiers()
        self._beat()
        self.registered.set()
        self.log.info("registered", pool=self.pool, card=self.card.hash[:12])
        return True

    def _pull(self) -> None:
        """One pull with the offered credit. What it brings takes from the credit, so that the next pull may come before
        the loop has counted again; a failure uses it up. With free room the pull stands (see `Receiver`)."""
        link = self.link
        with link.lock:
            credit, link.credit = ({} if link.quiet.is_set() else link.credit), {}
            tokens = max(0, link.tokens) if link.spare else 0
            pulled = self.functions.pull(self.pool, self.engine, credit, self.lease_ms, tokens, link.counted)
            link.credit = credit if link.tokens > 0 else {}
            for one in pulled.works:
                if (work := self.accept(one)) is not None:
                    link.spend(work)
            if pulled.works:
                link.inbox.put(Accounted(pulled.accounts))
        link.pulled.set()
        for raw in pulled.controls:
            self._obey(raw)
        if not pulled.registered:
            self._lost_lease()

    def look_for_lost(self) -> None:
        """Something may have been pulled for this engine that it has not heard of. From any thread."""
        self._recover = True
        self.link.nudge.set()

    def accept(self, pulled: Pulled) -> Work | None:
        """Hand a work to the loop. None: it can't be read, or has been before. From any thread."""
        try:
            work = decode(pulled.work, Work)
        except msgspec.DecodeError as error:
            self.log.error("unreadable_work", detail=str(error)[:200])
            self._recover = True
            return None
        arrived = Arrived(work, pulled.epoch, self.era, pulled.by_floor, pulled.light)
        return work if self.link.arrive(arrived) else None

    def _obey(self, raw: bytes) -> None:
        try:
            control = decode(raw, Control)
        except msgspec.DecodeError as error:
            self.log.error("unreadable_control", detail=str(error)[:200])
            return
        if control.kind == "cancel":
            self.link.cancel(control.argument, control.reason)
        elif control.kind == "drain":
            self.link.inbox.put(DrainOrdered())
        else:
            self.log.warning("unknown_control", kind=control.kind)

    def _lost_lease(self) -> None:
        """Reaped while asleep, or Redis lost its data. Only after the first do the requests belong to somebody else."""
        self.registered.clear()
        wiped = self.redis.get(self.keys.era) != self.era
        self.log.warning("lease_lost", redis_wiped=wiped)
        if not wiped:
            self.link.inbox.put(Abandoned())

    def _recover_lost_answers(self, cancels: bool = False) -> None:
        """Take over requests that Redis says we run but that we never heard of. After a failure: also lost cancels."""
        for raw in self.redis.smembers(self.keys.engine_requests(self.engine)):
            request = raw.decode()
            if request in self.link.known and not cancels:
                continue
            fields = ("state", "epoch", "stream", "entry", "cancel", "engine")
            record = dict(zip(fields, self.redis.hmget(self.keys.request(request), fields), strict=True))
            if record["state"] != b"running" or record["engine"] != self.engine.encode():
                continue
            if request not in self.link.known:
                self._fetch(request, record)
            if record["cancel"] is not None:
                self.link.cancel(request, record["cancel"].decode())
        self.link.early.clear()  # of requests that are not ours any more

    def _fetch(self, request: str, record: dict[str, bytes | None]) -> None:
        found = self.redis.xrange(record["stream"] or b"", min=record["entry"] or b"-", max=record["entry"] or b"+")
        epoch = int(record["epoch"] or 0)
        try:
            if not found:
                raise ValueError("its queue entry is gone")
            work = decode(found[0][1][b"w"], Work)
        except (ValueError, KeyError) as error:  # msgspec's errors are ValueErrors
            self.log.error("poison_work", request=request, detail=str(error)[:200])
            self._refuse(request, epoch)
            return
        if self.link.arrive(Arrived(work, epoch, self.era)):
            with self.link.lock:
                self.link.spend(work)
            self.log.info("recovered_work", request=request)

    def _refuse(self, request: str, epoch: int) -> None:
        """End a request that can't even be read, with what its record says of it."""
        names = ("tier", "tenant", "gateway", "prompt")
        tier, tenant, gateway, prompt = (
            (v or b"").decode() for v in self.redis.hmget(self.keys.request(request), names)
        )
        detail = "the request could not be read by the engine"
        delta = Delta(request, 0, epoch, 0, (), "", finish="error", code="bad_work", detail=detail, last=True)
        self.redis.xadd(self.keys.replies(gateway), {"d": encode([delta])}, nomkstream=True)
        final = Final(
            request, epoch, self.pool, tier, tenant, self.engine, "error", int(prompt or 0), 0, 0, 0, 0.0, 0.0,
            Timeline(), time.time_ns() // 1_000_000, "bad_work", detail,
        )  # fmt: skip
        self.functions.finish(request, epoch, encode(final))

    def _read_tiers(self) -> None:
        ranks = {
            int(rank): name.decode()
            for name, rank in self.redis.zrange(self.keys.tiers(self.pool), 0, -1, withscores=True)
        }
        if ranks.items() - self.link.tiers.items():
            self.link.tiers = {**self.link.tiers, **ranks}

    def _beat(self) -> None:
        self._beat_at = time.monotonic() + _HEARTBEAT_S
        if self.heartbeat is None:
            return
        self.redis.set(self.keys.engine(self.engine), encode(self.heartbeat()), px=_HEARTBEAT_TTL_MS)
        self._read_tiers()
        if self.registered.is_set():
            self._recover_lost_answers()
            if self.redis.get(self.keys.era) is None:
                self._lost_lease()


class Listener(threading.Thread):
    """Sleeps on the wake lists. A pool's list is only listened to while there is free room: its tokens wake one engine
    each, and a full engine must not swallow the one meant for an idle one. (It pulls at every step anyway.)"""

    def __init__(self, redis: Redis, keys: Keys, engine: str, pool: str, link: Link) -> None:
        super().__init__(name="listener", daemon=True)
        self.link, self._direct = link, Direct(redis)
        self.own, self.shared = keys.wake(engine), keys.wake(pool)
        self.stopped = threading.Event()

    def run(self) -> None:
        link = self.link
        while not self.stopped.is_set():
            with link.lock:  # while a pull is under way its credit is on the table, and seems to be none
                link.hungry = link.spare and bool(link.credit)
            keys = [self.own, self.shared] if link.hungry else [self.own]
            try:
                if self._direct.ask("BLPOP", *keys, _LISTEN_S):
                    link.pulled.clear()
                    link.nudge.set()
                    link.pulled.wait(_LISTEN_S)  # whether there is room is known after it
            except RedisError:
                self.stopped.wait(0.2)  # the puller notices the same and says so
