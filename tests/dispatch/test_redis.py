"""The client of the data plane keeps what asyncio promises."""

from __future__ import annotations

import asyncio

from gateway.dispatch.redis import connect


async def _lost_cancels(url: str) -> tuple[int, int]:
    """Tasks that went on although cancelled, and those that were cancelled in the middle."""
    redis = connect(url)

    async def pipe() -> None:
        pipe = redis.pipeline(transaction=False)
        pipe.get("x")
        await pipe.execute()

    async def turn(work: str) -> str:
        await (redis.get("x") if work == "get" else pipe())
        return "done"

    lost = stopped = 0
    for i in range(600):
        task = asyncio.create_task(turn(("get", "pipe")[i % 2]))
        for _ in range(i % 12):  # turns of the loop: every place where it waits is met
            await asyncio.sleep(0)
        if task.cancel():
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            lost += outcome == "done"
            stopped += isinstance(outcome, asyncio.CancelledError)
    assert await redis.get("x") is None  # no answer of another command is left on a connection
    await redis.aclose()
    return lost, stopped


def test_no_cancel_is_lost_in_a_command(redis_url: str) -> None:
    lost, stopped = asyncio.run(_lost_cancels(redis_url))
    assert lost == 0 and stopped > 300
