"""The moments between the parts of an answer: what arrives while something else is being sent is never lost."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import orjson
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from engine.protocol.functions import Claim, Verdict
from engine.protocol.messages import Delta, ModelCard, Sampling
from gateway.admission.admission import Order, Ticket
from gateway.api.answer import Answer, Wish
from gateway.api.embeddings import VectorAnswer
from gateway.api.frames import KEEP_ALIVE
from gateway.api.protocol import Lane
from gateway.api.responses import EventStream
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.flight import Route, Trail
from gateway.dispatch.registry import Model
from gateway.errors import ApiError
from tests.admission.test_keys import PRINCIPAL, TIER
from tests.harness import events


@pytest.fixture
async def answer() -> AsyncIterator[Answer]:
    """Of an admitted stream of one choice; nothing has arrived. No Redis is asked."""
    card = ModelCard("m", "h" * 12, 1, 100, 100, (0,), None, False, "", "", ("chat",), "m", 0)
    dispatcher = Dispatcher("redis://127.0.0.1:1/0", "none:", "g")
    trail = Trail(dispatcher.recorder, "g", "r", time.monotonic())
    flight = dispatcher.open(Route("r", "p", "m", "standard", "t", stream=True), 1, 1, trail, time.monotonic(), 0)
    order = Order("chat", Model("p", card, 1), ((1,),), Sampling(10), "messages", stream=True)
    yield Answer(Ticket(flight, order, PRINCIPAL, TIER, Verdict("ok"), None), Wish(chat=True), dispatcher)
    await dispatcher.redis.aclose()


def feed(answer: Answer, start: int, text: str, finish: str | None = None) -> None:
    tokens = tuple(map(ord, text))
    answer.ticket.flight.reply.feed(Delta("r", 0, 0, start, tokens, text, finish=finish, last=finish is not None))


async def test_an_end_that_comes_during_a_keep_alive(answer: Answer) -> None:
    stream = answer.events([])
    assert await anext(stream) == KEEP_ALIVE
    feed(answer, 0, "ab")
    feed(answer, 2, "c", "stop")
    rest = b"".join([part async for part in stream]).decode()
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(rest)) == "abc"
    assert rest.endswith("data: [DONE]\n\n")


async def test_a_failure_that_comes_during_a_keep_alive(answer: Answer) -> None:
    stream = answer.events([])
    assert await anext(stream) == KEEP_ALIVE
    answer.ticket.flight.reply.fail(ApiError("engine_lost", "gone"))
    rest = b"".join([part async for part in stream]).decode()
    assert events(rest)[-1]["error"]["code"] == "engine_lost" and "[DONE]" not in rest


async def test_an_end_before_the_first_event_is_asked_for(answer: Answer) -> None:
    stream = answer.events([])
    feed(answer, 0, "ab", "length")
    whole = b"".join([part async for part in stream]).decode()
    assert KEEP_ALIVE.decode() not in whole and whole.endswith("data: [DONE]\n\n")


class Written:
    """What a transport was given."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def opened() -> tuple[EventStream, Written]:
    """A stream whose head may go out with its first event, and what its client gets."""
    log, transport = logging.getLogger(), cast("Any", Written())
    scope: Any = {"method": "POST"}
    cycle = RequestResponseCycle(
        scope, transport, FlowControl(transport), log, log, False, [], asyncio.Event(), False, True, lambda: None
    )
    stream = EventStream("text/event-stream", {})
    stream.prepare("r", Lane(cycle))
    return stream, transport


def said(data: bytes) -> str:
    found = events(data.decode().replace("data: [DONE]", ""))
    return "".join(c["choices"][0]["delta"].get("content", "") for c in found if c["choices"])


async def test_first_events_go_out_as_they_come_and_once(answer: Answer) -> None:
    stream, client = opened()
    first = asyncio.create_task(answer.first(10, stream))
    await asyncio.sleep(0)
    assert not client.data
    feed(answer, 0, "ab")
    head, _, body = client.data.partition(b"\r\n\r\n")
    assert b"server-timing: cached" in head and b'"content":"ab"' in body
    feed(answer, 2, "c")  # before the task has run
    feed(answer, 3, "d", "stop")
    assert said(b"".join([part async for part in answer.events(await first)])) == "cd"
    assert answer.ticket.flight.delivered_tokens == 4


async def test_a_client_that_leaves_as_its_first_event_goes_out_finds_that_once_by_its_key(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bytes] = []

    async def keep(*arguments: object) -> None:
        kept.append(arguments[-1])  # type: ignore[arg-type]

    monkeypatch.setattr("gateway.api.answer.keep_result", keep)
    monkeypatch.setattr(Dispatcher, "_cancel", lambda *_: asyncio.sleep(0))
    answer.ticket = replace(answer.ticket, order=replace(answer.ticket.order, claim=Claim("k", "digest")))
    stream, client = opened()
    first = asyncio.create_task(answer.first(10, stream))
    await asyncio.sleep(0)
    feed(answer, 0, "ab")
    feed(answer, 2, "c", "stop")
    first.cancel()
    with pytest.raises(asyncio.CancelledError) as left:
        await first
    answer.close(left.value)
    await asyncio.gather(*answer._dispatcher._tasks)
    assert b'"content":"ab"' in client.data
    assert [said(whole) for whole in kept] == ["abc"]


async def test_a_client_that_leaves_between_two_vectors_finds_both_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []

    async def keep(*arguments: object) -> None:
        kept.append(arguments[-1])  # type: ignore[arg-type]

    monkeypatch.setattr("gateway.api.answer.keep_result", keep)
    monkeypatch.setattr(Dispatcher, "_cancel", lambda *_: asyncio.sleep(0))
    card = ModelCard(
        "m", "h" * 12, 1, 100, 100, (0,), None, False, "", "", ("embedding",), "m", 0, embedding_dimensions=2
    )
    dispatcher = Dispatcher("redis://127.0.0.1:1/0", "none:", "g")
    trail = Trail(dispatcher.recorder, "g", "r", time.monotonic())
    flight = dispatcher.open(Route("r", "p", "m", "standard", "t"), 2, 2, trail, time.monotonic(), 0)
    order = Order("embedding", Model("p", card, 1), ((1,), (2,)), Sampling(0), "input", claim=Claim("k", "digest"))
    answer = VectorAnswer(Ticket(flight, order, PRINCIPAL, TIER, Verdict("ok"), None), Wish(False), dispatcher)
    answering = asyncio.create_task(answer.whole())
    for choice in (1, 0):
        await asyncio.sleep(0)  # what came before has been taken
        vector = array("f", [choice, 0.5]).tobytes()
        flight.reply.feed(Delta("r", choice, 0, 0, (), "", finish="stop", last=choice == 0, vector=vector))
        await asyncio.sleep(0) if choice else answering.cancel()
    (left,) = await asyncio.gather(answering, return_exceptions=True)
    assert isinstance(left, asyncio.CancelledError)
    answer.close(left)
    await asyncio.gather(*dispatcher._tasks)
    assert [each["embedding"] for each in orjson.loads(kept[0])["data"]] == [[0.0, 0.5], [1.0, 0.5]]
    await dispatcher.redis.aclose()
