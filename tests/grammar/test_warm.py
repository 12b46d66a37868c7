"""What a constraint is tried in runs before the first request that has one."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from engine.protocol.messages import ModelCard
from gateway.api.grammars import Grammars
from gateway.dispatch.registry import Model


async def test_the_process_runs_before_the_first_constraint_comes(byte_card: ModelCard) -> None:
    card = replace(byte_card, capabilities=("chat", "grammar"))
    plain = replace(byte_card, hash="another", capabilities=("chat",))
    grammars = Grammars()

    async def models() -> list[Model]:
        return [Model("p", card, 1), Model("q", plain, 1)]

    warming = asyncio.create_task(grammars.warm(models))
    try:
        while not grammars._known:  # noqa: ASYNC110  (the test itself has no event to wait for)
            await asyncio.sleep(0.01)
        trial = grammars._trials[card.hash]
        child = trial._child
        assert child is not None and child.poll() is None and list(grammars._trials) == [card.hash]
        await grammars.check(card, '{"kind":"regex","regex":"a+"}', "regex", "alpha")
        assert trial._child is child and child.poll() is None
    finally:
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
        grammars.close()
