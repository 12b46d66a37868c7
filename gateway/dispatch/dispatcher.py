"""Everything of one data-plane process that talks to Redis: lease, replies, cancels, and what engines leave behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, cast

from redis.exceptions import RedisError

from engine.protocol.functions import Adopted, AsyncFunctions, LayoutMismatch
from engine.protocol.keys import Keys
from engine.protocol.messages import Delta, Final, Timeline, encode
from gateway.dispatch.admitter import Admitter
from gateway.dispatch.fanout import Fanout
from gateway.dispatch.flight import Flight, Route, Trail
from gateway.dispatch.follower import follow
from gateway.dispatch.reader import ReplyReader
from gateway.dispatch.recorder import Recorder
from gateway.dispatch.redis import connect
from gateway.dispatch.registry import Registry
from gateway.dispatch.reply import Reply
from gateway.errors import ApiError

__all__ = ["LEASE_MS", "Dispatcher"]

log = logging.getLogger(__name__)

LEASE_MS = 3000
_GRACE_S = 62.0
"""Redis ends a request whose client does not come back within 60 s; then its outcome is written here."""
_FOLLOWED = 256
_TICK_S = 0.75
"""Lease renewal, reaping and the search for forgotten requests: four times within a lease."""
_FORGOTTEN_TICKS = 2
"""A request must be missing in Redis this many ticks in a row: its last delta may still be on the way."""


class Dispatcher:
    """Owns the streams of this process. `start` and `stop` belong to the process's lifespan."""

    def __init__(self, redis_url: str, prefix: str, gateway: str) -> None:
        self.gateway = gateway
        self.keys = Keys(prefix)
        self.redis = connect(redis_url)
        # Longer than the block: a quiet stream is no dead connection.
        self._reading = connect(redis_url, connections=2, timeout_s=5.0)
        self._following = connect(redis_url, connections=_FOLLOWED, timeout_s=5.0)
        self.functions = AsyncFunctions(self.redis, self.keys)
        self.admitter = Admitter(self.redis, self.functions)
        self.recorder = Recorder(self.redis, self.keys)
        self.registry = Registry(self.redis, self.keys)
        self._reader = ReplyReader(self._reading, self.keys.replies(gateway), Fanout(self._deliver))
        self._flights: dict[str, Flight] = {}
        self._missing: dict[str, int] = {}
        self._parked: dict[str, Flight] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self.renewed_at = float("-inf")

    async def start(self) -> None:
        """Raises LayoutMismatch; a Redis that is away will be there later."""
        try:
            await self.functions.check_layout()
        except LayoutMismatch:
            raise
        except (RedisError, OSError) as error:
            log.warning("the data plane starts without Redis: %s", error)
        self.recorder.start()
        self._loops = [
            asyncio.create_task(self._reader.run(), name="reply reader"),
            asyncio.create_task(self._ticks(), name="gateway tick"),
        ]

    async def stop(self) -> None:
        """End what is still open, write what is still to write, let the lease lapse."""
        for flight in list(self._flights.values()):
            if not flight.parked:
                self.abandon(flight, "shutdown")
        for timer in self._graces.values():
            timer.cancel()
        for follower in self._followers:
            follower.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.recorder.stop()
        self.admitter.close()
        await self._reading.aclose()
        await self._following.aclose()
        await self.redis.aclose()

    @property
    def open_requests(self) -> int:
        return len(self._flights)

    @property
    def connected(self) -> bool:
        """The lease is held, so Redis answered within the last lease."""
        return time.monotonic() - self.renewed_at < LEASE_MS / 1000

    # -- requests -----------------------------------------------------------------------------------------------------

    def open(self, route: Route, choices: int, n: int, trail: Trail, received: float, received_ms: int) -> Flight:
        """Listen for a request's deltas. Before the loop turns again after it was enqueued: none comes earlier."""
        reply = Reply(route.request, choices, n)
        flight = Flight(route, reply, trail, self.recorder, received, received_ms)
        self._flights[route.request] = flight
        return flight

    def forget(self, flight: Flight) -> None:
        """The request was refused, so nothing will come."""
        self._flights.pop(flight.route.request, None)

    def abandon(self, flight: Flight, reason: str) -> None:
        """The client is gone, or must go: stop the request wherever it is (I4). The flight stays until it is done."""
        if flight.route.request in self._flights and not flight.stopping:
            flight.stopping = True
            self.spawn(self._cancel(flight, reason))
        flight.reply.fail(ApiError("shutting_down", "The request was stopped."))

    def abandon_slow(self, flight: Flight) -> None:
        """The client does not read: its stream alone ends (I3). Its task may be stuck in a send: cut that off too."""
        self.abandon(flight, "slow_client")
        if flight.consumer is not None:
            flight.consumer.cancel()

    # -- resumable requests -------------------------------------------------------------------------------------------

    def follow(self, flight: Flight) -> None:
        """Read an adopted request's deltas from the stream that outlives its gateways."""
        work = follow(self._following, self.keys, flight.reply, lambda d, made_ms: self._feed(flight, d, made_ms))
        task = asyncio.create_task(work)
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def asked(self, request: str, tenant: str) -> str | None:
        """What was asked by this tenant's resumable request; None when there is none, or no more."""
        kept = await cast(
            "Awaitable[list[bytes | None]]", self.redis.hmget(self.keys.resume(request), ["tenant", "ask"])
        )
        return kept[1].decode() if kept[1] is not None and kept[0] == tenant.encode() else None

    async def adopt(self, request: str, tenant: str) -> Adopted | None:
        """Make a resumable request this gateway's; a flight of it that is still here is over."""
        adopted = await self.functions.adopt(request, tenant, self.gateway)
        if adopted is not None and (known := self._parked_or_open(request)) is not None:
            self._hand_on(known)
        return adopted

    async def park(self, flight: Flight) -> None:
        """The client of a resumable request is gone: the request goes on for the grace."""
        request = flight.route.request
        flight.parked, flight.consumer = True, None
        flight.reply.discard()
        self._parked[request] = flight
        loop = asyncio.get_running_loop()
        self._graces[request] = loop.call_later(_GRACE_S, lambda: self.spawn(self._end_grace(flight)))
        if await self.functions.release(request, self.gateway, flight.turn, "park") == "moved":
            self._hand_on(flight)

    async def told(self, flight: Flight) -> None:
        """The client was sent the end, and the outcome is written: who still resumes it writes no other."""
        await self.functions.release(flight.route.request, self.gateway, flight.turn, "told")

    async def give_back(self, adopting: asyncio.Task[Adopted | None], request: str) -> None:
        """The client left while its request was adopted: it may come back."""
        if (adopted := await adopting) is not None:
            await self.functions.release(request, self.gateway, adopted.turn, "park")

    async def _end_grace(self, flight: Flight) -> None:
        request = flight.route.request
        if self._parked.get(request) is not flight:
            return
        if await self.functions.release(request, self.gateway, flight.turn, "drop") != "moved":
            flight.end(499, "abort", "client_disconnected")
        self._hand_on(flight)

    def _parked_or_open(self, request: str) -> Flight | None:
        return self._parked.get(request) or self._flights.get(request)

    def _hand_on(self, flight: Flight) -> None:
        """Another owner speaks for this request from now on: no cancel, no outcome from here."""
        request = flight.route.request
        if self._flights.get(request) is flight:
            del self._flights[request]
        if self._parked.get(request) is flight:
            del self._parked[request]
            self._graces.pop(request).cancel()
        flight.ended = True
        flight.reply.fail(ApiError("stream_moved", "Another connection goes on with this request."))

    async def _cancel(self, flight: Flight, reason: str) -> None:
        request = flight.route.request
        for pause_s in (0.1, 0.3, 1.0, 3.0, 0.0):
            try:
                was = (await self.functions.cancel(request, reason)).was
                break
            except (RedisError, OSError) as error:
                log.warning("cancel of %s waits for Redis: %s", request, error)
                await asyncio.sleep(pause_s)
        else:
            was = "unknown"
        if was == "lost":
            await self._settle_lost(flight, flight.reply.epoch)
        if was != "running":
            self._flights.pop(request, None)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do this apart from any request; `stop` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what engines send --------------------------------------------------------------------------------------------

    def _feed(self, flight: Flight, deltas: list[Delta], made_ms: int) -> None:
        """What a followed stream says."""
        now = time.monotonic()
        if flight.had:
            flight.was_first_sent(made_ms)
        for delta in deltas:
            flight.reply.feed(delta)
            flight.last_received = now
            flight.first_received = flight.first_received or now
            if delta.last and self._flights.get(delta.request) is flight:
                del self._flights[delta.request]

    def _deliver(self, deltas: list[Delta]) -> None:
        flights, now = self._flights, time.monotonic()
        for delta in deltas:
            flight = flights.get(delta.request)
            if flight is None:
                flight = self._parked.get(delta.request)
                if flight is None or delta.code != "stream_moved":
                    continue
            if delta.code == "stream_moved":
                if delta.start > flight.turn:
                    self._hand_on(flight)
                continue
            if flight.turn and not delta.code:
                continue  # it is followed: its kept stream tells the same, from the start
            if delta.code == "engine_lost":
                self.spawn(self._settle_lost(flight, delta.epoch))
            flight.reply.feed(delta)
            flight.last_received = now
            if flight.first_received is None:
                flight.first_received = now
            if delta.last:
                flights.pop(delta.request, None)

    async def _settle_lost(self, flight: Flight, epoch: int) -> None:
        """An engine died with this request: only this process knows what was delivered, so it writes the one Final."""
        route = flight.route
        final = Final(
            request=route.request,
            epoch=epoch,
            pool=route.pool,
            tier=route.tier,
            tenant=route.tenant,
            engine="",
            reason="lost",
            prompt_tokens=route.prompt_tokens,
            cached_tokens=flight.reply.cached_tokens,
            completion_tokens=flight.reply.received_tokens,
            wasted_tokens=0,
            engine_s=0.0,
            joules=0.0,
            timeline=Timeline(),
            at_ms=int(time.time() * 1000),
            code="engine_lost",
        )
        for pause_s in (0.1, 0.3, 1.0, 3.0, 0.0):
            try:
                await self.functions.finish(route.request, epoch, encode(final))
                return
            except (RedisError, OSError) as error:
                log.warning("settling %s waits for Redis: %s", route.request, error)
                await asyncio.sleep(pause_s)

    # -- the tick -----------------------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            try:
                await self._tick()
            except (RedisError, OSError) as error:
                log.warning("gateway tick: %s", error)
            await asyncio.sleep(_TICK_S)

    async def _tick(self) -> None:
        if not await self.functions.renew(self.gateway, LEASE_MS):
            self._fail_all("This gateway lost its lease; its requests were ended.")
        self.renewed_at = time.monotonic()
        await self.functions.reap()
        await self._find_forgotten()

    def _fail_all(self, message: str) -> None:
        for flight in [f for f in (*self._flights.values(), *self._parked.values()) if f.resumable]:
            self._hand_on(flight)
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.reply.fail(ApiError("queue_lost", message))

    async def _find_forgotten(self) -> None:
        """After a wipe of Redis nothing will ever come for its requests: they end with a retryable error (I5)."""
        before = time.monotonic() - _TICK_S
        requests = [r for r, f in self._flights.items() if f.admitted is not None and f.admitted < before]
        if not requests:
            self._missing.clear()
            return
        known = await cast(
            "Awaitable[list[int]]", self.redis.smismember(self.keys.gateway_requests(self.gateway), requests)
        )
        missing = {r: self._missing.get(r, 0) + 1 for r, held in zip(requests, known, strict=True) if not held}
        for request, ticks in missing.items():
            if ticks >= _FORGOTTEN_TICKS and (flight := self._flights.pop(request, None)) is not None:
                flight.reply.fail(ApiError("queue_lost", "The queue was restarted and lost this request."))
        self._missing = {r: t for r, t in missing.items() if t < _FORGOTTEN_TICKS}
