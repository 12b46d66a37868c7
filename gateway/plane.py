"""What one data-plane process is made of, built at its start and taken down at its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import uuid
from collections.abc import Awaitable, Callable

from django.conf import settings

from gateway.admission.admission import Admission
from gateway.admission.identity import Identity
from gateway.admission.prices import Prices
from gateway.api.grammars import Grammars
from gateway.api.prompts import Prompts
from gateway.dispatch.dispatcher import Dispatcher
from gateway.observability.metrics import Metrics
from tenants.billing.selectors import balance_nano, price_facts
from tenants.principals import find_principal

__all__ = ["Plane", "current"]

log = logging.getLogger(__name__)

_YOUNG = 10_000


class Plane:
    """The parts, wired. `start` may fail only for what no retry can mend; a missing Redis shows in /readyz instead."""

    def __init__(self) -> None:
        name = settings.SLUICE_GATEWAY_ID or "gw"
        # A process of its own, also among the workers of one server: reply streams and leases are per process.
        self.dispatcher = Dispatcher(settings.REDIS_URL, settings.SLUICE_REDIS_PREFIX, f"{name}-{uuid.uuid4().hex[:8]}")
        self.identity = Identity(find_principal, settings.SLUICE_KEY_PEPPER)
        self.admission = Admission(self.dispatcher, self.identity, Prices(price_facts), balance_nano)
        self.metrics = Metrics(lambda: self.dispatcher.open_requests, lambda: self.dispatcher.connected)
        self.dispatcher.recorder.on_outcome = self.metrics.outcome
        self.dispatcher.recorder.on_refusal = self.metrics.refusal
        self.prompts = Prompts()
        self.grammars = Grammars()
        self._beside: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.dispatcher.start()
        watching = self.identity.watch(self.dispatcher.redis, self.dispatcher.keys)
        warming = self.grammars.warm(self.dispatcher.registry.all)
        self._beside = [
            asyncio.create_task(watching, name="invalidation"),
            asyncio.create_task(warming, name="grammars"),
        ]
        log.info("data plane %s is up", self.dispatcher.gateway)

    async def stop(self) -> None:
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        await self.dispatcher.stop()
        self.grammars.close()
        self.prompts.close()


_current: Plane | None = None


def current() -> Plane:
    """The plane of this process. Views may use it; it exists from lifespan startup to shutdown."""
    if _current is None:
        raise RuntimeError("the data plane is not running: start it under an ASGI server with lifespan support")
    return _current


def _spare_the_collector() -> None:
    """What was imported stays for good: a full collection that visits it all stops every stream for tens of
    milliseconds. Requests leave few cycles, so the young generation may be larger than Python's 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)


async def lifespan(receive: Callable[[], Awaitable[dict]], send: Callable[[dict], Awaitable[None]]) -> None:
    """The ASGI lifespan protocol: build at startup, take down at shutdown."""
    global _current
    await receive()
    try:
        _current = Plane()
        await _current.start()
    except Exception as error:
        log.exception("the data plane could not start")
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return
    _spare_the_collector()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    plane, _current = _current, None
    await plane.stop()
    await send({"type": "lifespan.shutdown.complete"})
