"""Whether a constraint can be enforced at all, found out before anything is admitted: tried in a killable process."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from engine.protocol.messages import ModelCard
from engine.text.grammar import Trial, TrialError
from gateway.errors import ApiError

__all__ = ["Grammars"]

log = logging.getLogger(__name__)

_REMEMBERED = 1024
_PROCESSES = 4
"""Models whose trial process is kept; the one used longest ago ends."""


class Grammars:
    """Trials by model card, and what they said. A constraint seen before is answered from memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._trials: OrderedDict[str, Trial] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], str | None] = OrderedDict()

    def close(self) -> None:
        for trial in self._trials.values():
            trial.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def check(self, card: ModelCard, grammar: str, param: str) -> None:
        """Raises `ApiError` 400 with the reason when `grammar` can't be enforced for this model."""
        key = (card.hash, grammar)
        if key not in self._known:
            try:
                refusal = await asyncio.get_running_loop().run_in_executor(self._pool, self._refusal, card, grammar)
            except TrialError as error:
                log.error("constraints can't be tried: %s", error)
                raise ApiError("backend_unavailable", "The constraint can't be checked right now.") from None
            self._known[key] = refusal
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        if (reason := self._known[key]) is not None:
            raise ApiError("invalid_value", f"'{param}' can't be enforced: {reason[:500]}.", param=param)

    def _refusal(self, card: ModelCard, grammar: str) -> str | None:
        trial = self._trials.pop(card.hash, None) or Trial(card)
        self._trials[card.hash] = trial
        while len(self._trials) > _PROCESSES:
            self._trials.popitem(last=False)[1].close()
        return trial.refusal(grammar)
