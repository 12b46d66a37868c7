"""A WebSocket stream that goes on after its connection, or its gateway, is gone: nothing lost, nothing twice."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from tests.admission.test_limits import open_requests, until
from tests.api.test_chat import ASK
from tests.api.test_sockets import CHAT, answers, opened, receive, say, text
from tests.dispatch.test_ends import finals, outcomes
from tests.harness import Gateway, Stack

POOL = "resumed"
TOKENS = 60


@pytest.fixture(scope="module")
def pool(stack: Stack, gateway: Gateway) -> str:
    """A model that needs about 1.5 s for an answer."""
    stack.engine("decode_tps=40,prefill_tps=0", pool=POOL)
    return POOL


def body(**fields: Any) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS, "seed": 7}
    return {**ASK, "model": POOL, **options, **fields}


async def begin(socket: ClientConnection, chunks: int, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """A resumable request, and its first chunks."""
    assert (await receive(socket))["type"] == "ready"
    await say(socket, type="request", id="a", path=CHAT, resumable=True, body=body(**fields))
    accepted = await receive(socket)
    assert accepted["type"] == "accepted", accepted
    return accepted["request"], [await receive(socket) for _ in range(chunks)]


async def resume(gateway: Gateway, request: str, start: int, tenant: str = "alpha") -> list[dict[str, Any]]:
    async with opened(gateway, tenant) as socket:
        assert (await receive(socket))["type"] == "ready"
        await say(socket, type="resume", id="b", request=request, **{"from": start})
        return (await answers(socket, {"b"}))["b"]


async def whole(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    async with opened(gateway) as socket:
        assert (await receive(socket))["type"] == "ready"
        await say(socket, type="request", id="a", path=CHAT, resumable=True, body=body(**fields))
        return (await answers(socket, {"a"}))["a"]


def choices(messages: list[dict[str, Any]]) -> list[Any]:
    """What was said, without what differs between two requests."""
    chunks = [
        (m["index"], m["data"]["choices"], m["data"].get("usage") or {}) for m in messages if m["type"] == "chunk"
    ]
    return [(index, said, usage.get("completion_tokens")) for index, said, usage in chunks]


async def one_of_each(stack: Stack, request: str, reason: str = "length") -> None:
    await until(lambda: outcomes(stack, request) and finals(stack, request))
    (outcome,), (final,) = outcomes(stack, request), finals(stack, request)
    assert (outcome.status, outcome.reason, final.reason) == (200, reason, reason)
    assert outcome.delivered_tokens == final.completion_tokens


@pytest.mark.parametrize("n", [1, 3])
async def test_a_dropped_connection_goes_on_where_it_stood(gateway: Gateway, pool: str, n: int) -> None:
    undisturbed = await whole(gateway, n=n)
    async with opened(gateway) as socket:
        request, before = await begin(socket, 9, n=n)
    after = await resume(gateway, request, 9)
    assert after[0] == {"type": "accepted", "id": "b", "request": request} and after[-1]["type"] == "done"
    assert choices(before + after) == choices(undisturbed) and text(before + after) == text(undisturbed)
    assert len({m["data"]["created"] for m in before + after if m["type"] == "chunk"}) == 1
    await one_of_each(gateway.stack, request)


async def test_its_time_to_the_first_token_is_what_the_first_connection_saw(gateway: Gateway, pool: str) -> None:
    async with opened(gateway) as socket:
        asked = time.monotonic()
        request, _ = await begin(socket, 1)
        first_s = time.monotonic() - asked
        for _ in range(12):  # 0.3 s
            await receive(socket)
    await resume(gateway, request, 13)
    await until(lambda: outcomes(gateway.stack, request))
    (outcome,) = outcomes(gateway.stack, request)
    assert outcome.ttft_s is not None and 0 < outcome.ttft_s <= first_s + 0.002  # times are kept in milliseconds


@pytest.mark.slow
async def test_a_killed_gateway_s_stream_goes_on_at_another(gateway: Gateway, stack: Stack, pool: str) -> None:
    undisturbed = await whole(gateway, max_tokens=250)
    other = stack.gateway()
    async with opened(other) as socket:
        request, before = await begin(socket, 9, max_tokens=250)
        other.process.child.kill()
        other.process.child.wait()
    # Its lease lapses and it is reaped while the engine goes on.
    await until(lambda: stack.redis.hget(f"{stack.prefix}req:{request}", "gateway") == b"", 8.0)
    after = await resume(gateway, request, 9)
    assert after[-1]["type"] == "done" and choices(before + after) == choices(undisturbed)
    await one_of_each(stack, request)
    assert open_requests(stack, "alpha") == 0


async def test_it_goes_on_at_once_while_the_killed_gateway_s_lease_still_runs(
    gateway: Gateway, stack: Stack, pool: str
) -> None:
    undisturbed = await whole(gateway)
    other = stack.gateway()
    async with opened(other) as socket:
        request, before = await begin(socket, 5)
        other.process.child.kill()
        other.process.child.wait()
    after = await resume(gateway, request, 5)
    assert after[-1]["type"] == "done" and choices(before + after) == choices(undisturbed)
    await one_of_each(stack, request)


@pytest.mark.slow
async def test_a_second_resume_takes_over(gateway: Gateway, stack: Stack, pool: str) -> None:
    undisturbed = await whole(gateway, max_tokens=120)
    other = stack.gateway()
    async with opened(gateway) as first, opened(other) as second:
        request, before = await begin(first, 5, max_tokens=120)
        assert (await receive(second))["type"] == "ready"
        await say(second, type="resume", id="x", request=request, **{"from": 5})
        taken = [await receive(second) for _ in range(4)]
        lost = (await answers(first, {"a"}))["a"]
        assert lost[-1]["type"] == "error" and lost[-1]["error"]["code"] == "stream_moved"
        after = await resume(gateway, request, 8)
        moved = (await answers(second, {"x"}))["x"][-1]
        assert moved["type"] == "error" and moved["error"]["code"] == "stream_moved"
    assert choices(before + taken + after) == choices(undisturbed)
    await one_of_each(stack, request)
    other.process.stop()


async def test_a_finished_answer_is_told_again_without_a_second_record(gateway: Gateway, pool: str) -> None:
    first = await whole(gateway)
    request = first[0]["request"]
    await until(lambda: gateway.stack.redis.hget(f"{gateway.stack.prefix}resume:{request}", "told") == b"1")
    again = await resume(gateway, request, 0)
    assert choices(again) == choices(first) and again[-1]["type"] == "done"
    rest = await resume(gateway, request, 55)
    assert choices(rest) == choices(first)[55:]
    await one_of_each(gateway.stack, request)
    assert 0 < gateway.stack.redis.pttl(f"{gateway.stack.prefix}out:{request}") <= 60_000


async def test_only_its_tenant_may_resume_and_only_what_is_kept(gateway: Gateway, pool: str) -> None:
    request = (await whole(gateway))[0]["request"]
    async with opened(gateway) as socket:
        await receive(socket)
        await say(socket, type="request", id="plain", path=CHAT, body=body())
        plain = (await answers(socket, {"plain"}))["plain"]
        assert "index" not in plain[1]
        await say(
            socket, type="request", id="c", path=CHAT, resumable=True, body=body(stream=False, stream_options=None)
        )
        assert (await answers(socket, {"c"}))["c"][0]["error"]["param"] == "resumable"
    for wanted, tenant in ((request, "delta"), (plain[0]["request"], "alpha"), ("0" * 32, "alpha")):
        (error,) = await resume(gateway, wanted, 0, tenant)
        assert error["type"] == "error" and error["error"]["code"] == "resume_unknown", json.dumps(error)


async def test_a_client_s_cancel_ends_it_for_good(gateway: Gateway, stack: Stack, pool: str) -> None:
    async with opened(gateway) as socket:
        request, _ = await begin(socket, 2, max_tokens=5000)
        await say(socket, type="cancel", id="a")
        await until(lambda: outcomes(stack, request) and finals(stack, request))
    assert finals(stack, request)[0].reason == "abort" and outcomes(stack, request)[0].status == 499


@pytest.mark.slow
async def test_who_does_not_come_back_is_cancelled_after_a_minute(gateway: Gateway, stack: Stack, pool: str) -> None:
    async with opened(gateway) as socket:
        request, _ = await begin(socket, 2, max_tokens=5000)
    grace = f"{stack.prefix}grace"
    await until(lambda: stack.redis.zscore(grace, request) is not None)
    await until(lambda: finals(stack, request) and outcomes(stack, request), 90.0)
    (outcome,), (final,) = outcomes(stack, request), finals(stack, request)
    assert (outcome.status, outcome.code, final.reason) == (499, "client_disconnected", "abort")
    assert final.completion_tokens > 500, "it went on for the minute"
    assert (await resume(gateway, request, 0))[0]["error"]["code"] == "resume_unknown"


@pytest.mark.slow
async def test_a_gateway_that_stops_leaves_its_resumable_streams_to_others(
    gateway: Gateway, stack: Stack, pool: str
) -> None:
    undisturbed = await whole(gateway, max_tokens=200)
    other = stack.gateway()
    async with opened(other) as socket:
        request, before = await begin(socket, 5, max_tokens=200)
        other.process.stop()
    after = await resume(gateway, request, 5)
    assert after[-1]["type"] == "done" and choices(before + after) == choices(undisturbed)
    await one_of_each(stack, request)


async def test_an_engine_that_dies_without_a_client_is_told_at_the_resume(gateway: Gateway, stack: Stack) -> None:
    engine = stack.engine("decode_tps=40,prefill_tps=0", pool="mortal")
    async with opened(gateway) as socket:
        request, _ = await begin(socket, 5, model="mortal", max_tokens=5000)
    engine.child.kill()
    await until(lambda: finals(stack, request), 15.0)
    after = await resume(gateway, request, 5)
    assert after[-1]["type"] == "error" and after[-1]["error"]["code"] == "engine_lost"
    await until(lambda: outcomes(stack, request))
    assert len(outcomes(stack, request)) == len(finals(stack, request)) == 1
    assert finals(stack, request)[0].reason == "lost"
