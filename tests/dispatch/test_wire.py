"""Whoever asks on a wire is told: its own answer, or why there is none, in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.dispatch.redis import connect
from gateway.dispatch.wire import Wire, pack


def _run(url: str, test: Callable[[Wire], Awaitable[Any]], timeout_s: float = 1.0) -> Any:
    async def run() -> Any:
        redis = connect(url, timeout_s=timeout_s)
        wire = await Wire.open(redis)
        try:
            return await test(wire)
        finally:
            wire.close()
            await redis.aclose()

    return asyncio.run(run())


async def _ask(wire: Wire, *words: str) -> Any:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    wire.ask(pack(*words), future.set_result)
    return await future


def test_answers_come_in_their_order(redis_url: str) -> None:
    async def many(wire: Wire) -> Any:
        return await asyncio.gather(*[_ask(wire, "ECHO", f"{i}" * 1000) for i in range(200)])

    assert _run(redis_url, many) == [(f"{i}" * 1000).encode() for i in range(200)]


def test_an_error_is_an_answer_like_any_other(redis_url: str) -> None:
    async def three(wire: Wire) -> Any:
        return await asyncio.gather(_ask(wire, "ECHO", "a"), _ask(wire, "NONSENSE"), _ask(wire, "ECHO", "b"))

    first, error, last = _run(redis_url, three)
    assert (first, last) == (b"a", b"b")
    assert isinstance(error, ResponseError)


def test_a_cut_connection_is_told_to_all_who_wait_and_who_come(redis_url: str, redis: Any) -> None:
    async def cut(wire: Wire) -> Any:
        number = await _ask(wire, "CLIENT", "ID")
        waiting = [asyncio.create_task(_ask(wire, "BLPOP", f"nothing:{i}", "5")) for i in range(3)]
        await asyncio.sleep(0.05)
        assert redis.client_kill_filter(_id=str(number)) == 1
        answers = await asyncio.gather(*waiting)
        assert wire.closed
        return [*answers, await _ask(wire, "PING")]

    assert all(isinstance(answer, RedisConnectionError) for answer in _run(redis_url, cut))


_NONSENSE = b"+A\r\n+B\r\n"


@pytest.mark.parametrize(
    ("says", "told"), [(b"", RedisTimeoutError), (b"this is no answer\r\n", RedisConnectionError), (_NONSENSE, bytes)]
)
def test_a_server_that_hangs_or_talks_nonsense_ends_the_wire_in_time(says: bytes, told: type) -> None:
    """The second of two answers to one question belongs to nobody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = {b"CLIENT": b"+OK\r\n", b"SELECT": b"+OK\r\n", b"HELLO": b"%1\r\n+proto\r\n:3\r\n", b"ASKED": says}
        while line := await reader.readline():
            writer.write(answers.get(line.strip(), b""))

    async def run() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        wire = await Wire.open(connect(f"redis://127.0.0.1:{port}/0", timeout_s=0.3))
        async with asyncio.timeout(5):
            answer = await _ask(wire, "ASKED")
            after = await _ask(wire, "SELECT", "0")
        server.close()
        return answer, after, wire.closed

    answer, after, closed = asyncio.run(run())
    assert isinstance(answer, told)
    assert isinstance(after, RedisError)
    assert closed
