"""Whether a constraint can be enforced at all, found out before anything is admitted: tried in a killable process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from redis.exceptions import RedisError

from engine.protocol.messages import ModelCard
from engine.text.grammar import COMMON, Trial, TrialError
from gateway.dispatch.registry import Model
from gateway.errors import ApiError

__all__ = ["Grammars"]

log = logging.getLogger(__name__)

_REMEMBERED = 4096
_LOOK_S = 5.0
_SOON_S = 0.5
_PROCESSES = 4
"""Models whose trial process is kept; the one used longest ago ends."""


class Grammars:
    """Trials by model card, and what they said. A constraint seen before is answered from memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._trials: OrderedDict[str, Trial] = OrderedDict()
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        for trial in self._trials.values():
            trial.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def warm(self, models: Callable[[], Awaitable[list[Model]]]) -> None:
        """Until cancelled: start the trial process of every model that comes, before the first request that needs it
        would have to wait for that. Beside the rest: nothing waits for this."""
        warmed: set[str] = set()
        pause_s = _SOON_S
        while True:
            try:
                found = await models()
                pause_s = _LOOK_S if found else pause_s
            except (ApiError, RedisError, OSError) as error:
                log.info("constraints are not ready yet: %s", error)
                found, pause_s = [], _LOOK_S
            for card in [m.card for m in found if "grammar" in m.card.capabilities and m.live]:
                if card.hash not in warmed:
                    await self._warm(card)
                    warmed.add(card.hash)  # also when it failed: a request will say why
            await asyncio.sleep(pause_s)

    async def _warm(self, card: ModelCard) -> None:
        try:
            await self.check(card, COMMON, "response_format", "")
        except (ApiError, OSError) as error:
            log.warning("constraints of %s: %s", card.model, error)

    async def check(self, card: ModelCard, grammar: str, param: str, tenant: str) -> None:
        """Raises `ApiError` 400 with the reason when `grammar` can't be enforced for this model."""
        key = hashlib.blake2b(f"{card.hash} {grammar}".encode(), digest_size=16).digest()
        if key not in self._known:
            # One at a time for each tenant: who sends many slow ones waits for himself.
            lock = self._locks.setdefault(tenant, asyncio.Lock())
            async with lock:
                if key not in self._known:
                    await self._try(key, card, grammar)
        if (reason := self._known[key]) is not None:
            raise ApiError("invalid_grammar", f"'{param}' can't be enforced: {reason}.", param=param)

    async def _try(self, key: bytes, card: ModelCard, grammar: str) -> None:
        try:
            refusal = await asyncio.get_running_loop().run_in_executor(self._pool, self._refusal, card, grammar)
        except TrialError as error:
            log.error("constraints can't be tried: %s", error)
            raise ApiError("backend_unavailable", "The constraint can't be checked right now.") from None
        self._known[key] = refusal
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _refusal(self, card: ModelCard, grammar: str) -> str | None:
        trial = self._trials.pop(card.hash, None) or Trial(card)
        self._trials[card.hash] = trial
        while len(self._trials) > _PROCESSES:
            self._trials.popitem(last=False)[1].close()
        return trial.refusal(grammar)
