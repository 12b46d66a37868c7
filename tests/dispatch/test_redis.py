"""The client of the data plane keeps what asyncio promises."""

from __future__ import annotations

import asyncio

import pytest
import redis.exceptions

from engine.protocol.functions import LayoutMismatch
from gateway.dispatch.redis import connect, queue_error


async def _lost_cancels(url: str) -> tuple[int, int]:
    """Tasks that went on although cancelled, and those that were cancelled in the middle."""
    client = connect(url)

    async def pipe() -> None:
        pipe = client.pipeline(transaction=False)
        pipe.get("x")
        await pipe.execute()

    async def turn(work: str) -> str:
        await (client.get("x") if work == "get" else pipe())
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
    assert await client.get("x") is None  # no answer of another command is left on a connection
    await client.aclose()
    return lost, stopped


def test_no_cancel_is_lost_in_a_command(redis_url: str) -> None:
    lost, stopped = asyncio.run(_lost_cancels(redis_url))
    assert lost == 0 and stopped > 300


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (redis.exceptions.ConnectionError("Connection refused"), 503),
        (redis.exceptions.BusyLoadingError("loading the dataset in memory"), 503),
        (redis.exceptions.TimeoutError("Timeout reading from socket"), 503),
        (ConnectionResetError(104, "Connection reset by peer"), 503),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), 503),
        (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), 503),
        (redis.exceptions.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), 503),
        (redis.exceptions.ResponseError("BUSY Valkey is busy running a script."), 503),
        (redis.exceptions.TryAgainError("Multiple keys request during rehashing of slot"), 503),
        (LayoutMismatch("sluice:", "2"), 503),
        (redis.exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), 500),
        (redis.exceptions.ResponseError("user_function:4: attempt to perform arithmetic on a nil value"), 500),
        (redis.exceptions.DataError("Invalid input of type: 'NoneType'."), 500),
    ],
)
def test_what_waiting_mends_is_503_and_what_we_did_wrong_is_500(answer: Exception, status: int) -> None:
    error = queue_error("admission of r", answer)  # type: ignore[arg-type]
    assert error.status == status and (error.retry_after_s is not None) == (status == 503)
