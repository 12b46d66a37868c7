"""The receiving end of a request: order, repeats, epochs, holes, bounds."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.messages import Delta
from gateway.dispatch.reply import Reply
from gateway.errors import ApiError


def delta(start: int, text: str = "", *, choice: int = 0, epoch: int = 0, **rest: object) -> Delta:
    tokens = tuple(ord(c) for c in text)
    return Delta("r", choice, epoch, start, tokens, text, **rest)  # type: ignore[arg-type]


async def received(reply: Reply) -> list[Delta]:
    got: list[Delta] = []
    while batch := await reply.get(0):
        got += batch
    return got


async def test_in_order_until_the_end() -> None:
    reply = Reply("r", 1)
    reply.feed(delta(0, "ab"))
    reply.feed(delta(2, "c"))
    reply.feed(delta(3, finish="stop", last=True))
    assert "".join(d.text for d in await received(reply)) == "abc" and reply.ended
    assert await reply.get() == []


async def test_a_consumer_that_waits_is_woken() -> None:
    reply = Reply("r", 1)
    waiting = asyncio.create_task(reply.get())
    await asyncio.sleep(0)
    reply.feed(delta(0, "a"))
    assert [d.text for d in await waiting] == ["a"]


async def test_nothing_within_the_time_is_an_empty_list() -> None:
    reply = Reply("r", 1)
    assert await reply.get(0.01) == [] and not reply.ended


async def test_a_hole_ends_it_with_an_error() -> None:
    for hole in (delta(2, "c"), delta(0, "abc")):
        reply = Reply("r", 1)
        reply.feed(delta(0, "a"))
        reply.feed(hole)
        assert [d.text for d in await reply.get()] == ["a"]
        with pytest.raises(ApiError, match="lost"):
            await reply.get()


async def test_an_older_epoch_is_dropped() -> None:
    reply = Reply("r", 1)
    reply.feed(delta(0, "a"))
    reply.feed(delta(1, "b", epoch=1))
    reply.feed(delta(1, "x"))
    reply.feed(delta(2, "y"))
    reply.feed(delta(2, "c", epoch=1))
    assert "".join(d.text for d in await received(reply)) == "abc"


async def test_an_error_comes_after_what_already_arrived() -> None:
    reply = Reply("r", 1)
    reply.feed(delta(0, "a"))
    reply.feed(delta(0, finish="error", code="engine_lost", epoch=1, last=True))
    assert [d.text for d in await reply.get()] == ["a"]
    with pytest.raises(ApiError) as caught:
        await reply.get()
    assert caught.value.code == "engine_lost" and caught.value.retry


async def test_too_much_unread_ends_this_stream_and_frees_its_memory() -> None:
    reply = Reply("r", 1, limit=10)
    told: list[bool] = []
    reply.on_overflow = lambda: told.append(True)
    for i in range(100):
        reply.feed(delta(i, "x"))
    assert told == [True]
    with pytest.raises(ApiError) as caught:
        await reply.get()
    assert caught.value.code == "slow_client"
    assert reply.received_tokens == 100, "what was computed still counts"


async def test_cached_tokens_are_counted_once_a_prompt() -> None:
    reply = Reply("r", 4, n=2)
    for choice in range(4):
        reply.feed(delta(0, "a", choice=choice, cached_tokens=16))
    assert reply.cached_tokens == 32


@settings(deadline=None, derandomize=True, max_examples=75)
@given(st.data())
def test_whatever_is_repeated_each_token_comes_once(data: st.DataObject) -> None:
    """Steps of several choices, each resent any number of times, also from older epochs, give each choice its text."""
    choices = data.draw(st.integers(1, 3))
    texts = [data.draw(st.text("abcdef", max_size=12)) for _ in range(choices)]
    sent: list[Delta] = []
    at = [0] * choices
    epoch = 0

    async def run() -> list[str]:
        reply = Reply("r", choices)
        while any(at[c] < len(texts[c]) for c in range(choices)):
            nonlocal epoch
            c = data.draw(st.sampled_from([c for c in range(choices) if at[c] < len(texts[c])]))
            size = data.draw(st.integers(1, 4))
            epoch += data.draw(st.integers(0, 1))
            sent.append(delta(at[c], texts[c][at[c] : at[c] + size], choice=c, epoch=epoch))
            at[c] = min(len(texts[c]), at[c] + size)
            reply.feed(sent[-1])
            for again in data.draw(st.lists(st.sampled_from(sent), max_size=3)):
                reply.feed(again)
        got = [""] * choices
        for d in await received(reply):
            got[d.choice] += d.text
        return got

    assert asyncio.run(run()) == texts


def sinking(takes: bool = True) -> tuple[Reply, list[str]]:
    """A reply with a sink, and the texts that it got."""
    reply, got = Reply("r", 1), list[str]()

    def sink(batch: list[Delta]) -> bool:
        got.extend(d.text for d in batch)
        return takes

    reply.sink = sink
    return reply, got


async def test_a_sink_gets_what_comes_while_the_consumer_waits_and_the_consumer_the_end() -> None:
    reply, sunk = sinking()
    reply.feed(delta(0, "a"))  # nobody waits yet: in its turn
    assert [d.text for d in await reply.get()] == ["a"]
    waiting = asyncio.create_task(reply.get())
    await asyncio.sleep(0)
    reply.feed(delta(1, "b"))
    reply.feed(delta(2, "c"))
    await asyncio.sleep(0)
    assert sunk == ["b", "c"] and not waiting.done()
    reply.feed(delta(3, "d", finish="stop", last=True))
    assert [d.text for d in await waiting] == ["d"] and sunk == ["b", "c"]


async def test_what_a_sink_does_not_take_the_consumer_has_whole_and_in_order() -> None:
    reply, _ = sinking(takes=False)
    waiting = asyncio.create_task(reply.get())
    await asyncio.sleep(0)
    reply.feed(delta(0, "a"))
    reply.feed(delta(1, "b"))
    assert [d.text for d in await waiting] == ["a", "b"]


async def test_a_sink_that_fails_fails_its_consumer_and_not_who_feeds() -> None:
    reply = Reply("r", 1)
    reply.sink = lambda batch: 1 // 0 > 0
    waiting = asyncio.create_task(reply.get())
    await asyncio.sleep(0)
    reply.feed(delta(0, "a"))
    with pytest.raises(ZeroDivisionError):
        await waiting


async def test_silence_is_counted_from_what_a_sink_took_last() -> None:
    reply, sunk = sinking()
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(reply.get(0.1))
    await asyncio.sleep(0.07)
    reply.feed(delta(0, "a"))
    fed = loop.time()
    assert await waiting == [] and sunk == ["a"]
    assert loop.time() - fed > 0.09
