"""What the gateway says of models holds for the moment it was asked."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.protocol.functions import Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import ModelCard, encode
from gateway.dispatch.redis import connect
from gateway.dispatch.registry import Registry

CARD = ModelCard("m", "h" * 12, 1, 100, 100, (0,), None, False, "", "", ("chat",), "m", 0)


def test_a_model_is_known_as_soon_as_its_engine_has_registered(redis: Any, redis_prefix: str, redis_url: str) -> None:
    keys = Keys(redis_prefix)

    async def run() -> None:
        client = connect(redis_url, timeout_s=5.0)
        registry = Registry(client, keys)
        reads = 0
        read = registry._read

        async def counted() -> None:
            nonlocal reads
            reads += 1
            await read()

        registry._read = counted  # type: ignore[method-assign]
        try:
            assert await registry.find("m") is None
            Functions(redis, keys).register("m", "e1", CARD.hash, encode(CARD), 10_000)
            found = await registry.find("m")
            assert found is not None and found.live == 1, "though it was looked for a moment ago"
            before = reads
            assert await asyncio.gather(*(registry.find(f"guess {n}") for n in range(50))) == [None] * 50
            assert reads - before <= 2, "guessers share a look"
        finally:
            await client.aclose()

    asyncio.run(run())
