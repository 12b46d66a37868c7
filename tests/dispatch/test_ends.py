"""How requests end: client gone, engine killed, Redis wiped, shutdown. Nothing stays behind; one outcome each."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import httpx

from engine.protocol.messages import Final, Outcome, decode
from tests.admission.test_limits import open_requests, start, until
from tests.api.test_chat import ASK
from tests.api.test_errors import check
from tests.harness import POOL, Gateway, Stack, events


def outcomes(stack: Stack, request: str) -> list[Outcome]:
    entries = stack.redis.xrevrange(f"{stack.prefix}outcomes", count=500)
    return [o for o in (decode(f[b"o"], Outcome) for _, f in entries) if o.request == request]


def finals(stack: Stack, request: str) -> list[Final]:
    entries = stack.redis.xrevrange(f"{stack.prefix}usage", count=500)
    return [o for o in (decode(f[b"f"], Final) for _, f in entries) if o.request == request]


def held(stack: Stack, tenant: str) -> set[bytes]:
    return stack.redis.smembers(f"{stack.prefix}open:{tenant}")


async def test_a_whole_answer_has_one_outcome_and_one_final_that_agree(gateway: Gateway) -> None:
    async with gateway.async_client() as client:
        response = await client.post(
            "/chat/completions", json={**ASK, "n": 2}, headers={"x-client-request-id": "mine-1"}
        )
    request, usage = response.headers["x-request-id"], response.json()["usage"]
    await until(lambda: outcomes(gateway.stack, request) and finals(gateway.stack, request))
    (outcome,), (final,) = outcomes(gateway.stack, request), finals(gateway.stack, request)
    assert outcome.status == 200 and outcome.reason == "length" and outcome.client_request_id == "mine-1"
    assert outcome.delivered_tokens == final.completion_tokens == usage["completion_tokens"]
    assert outcome.prompt_tokens == final.prompt_tokens == usage["prompt_tokens"]
    assert final.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_stream_has_one_outcome_with_its_times(gateway: Gateway) -> None:
    async with gateway.async_client() as client:
        response = await client.post("/chat/completions", json={**ASK, "stream": True})
    request = response.headers["x-request-id"]
    await until(lambda: outcomes(gateway.stack, request))
    (outcome,) = outcomes(gateway.stack, request)
    assert outcome.stream and outcome.delivered_tokens == 12
    assert outcome.ttft_s and outcome.tpot_s and outcome.stall_s and outcome.total_s >= outcome.ttft_s


async def gone(stack: Stack, tenant: str, leave: Callable[[], Any]) -> None:
    """After `leave` everything that the tenant's requests held is free within a second."""
    await until(lambda: open_requests(stack, tenant) > 0)
    await leave()
    await until(lambda: open_requests(stack, tenant) == 0, 1.0)


async def test_the_client_leaves_a_stream(gateway: Gateway) -> None:
    async with gateway.async_client("delta") as client:
        response = await start(client)
        await gone(gateway.stack, "delta", response.aclose)
    request = response.headers["x-request-id"]
    await until(lambda: outcomes(gateway.stack, request) and finals(gateway.stack, request))
    (outcome,), (final,) = outcomes(gateway.stack, request), finals(gateway.stack, request)
    assert (outcome.status, outcome.code) == (499, "client_disconnected")
    assert final.reason == "abort" and 0 < final.completion_tokens < 5000


async def test_the_client_leaves_before_its_whole_answer(gateway: Gateway) -> None:
    stack = gateway.stack
    async with gateway.async_client("delta") as client:
        asking = asyncio.create_task(client.post("/chat/completions", json={**ASK, "max_tokens": 5000}))
        await until(lambda: held(stack, "delta"))
        (request,) = (r.decode() for r in held(stack, "delta"))
        await until(lambda: stack.redis.hget(f"{stack.prefix}req:{request}", "state") == b"running")

        async def leave() -> None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        await gone(stack, "delta", leave)
    await until(lambda: outcomes(stack, request) and finals(stack, request))
    assert len(outcomes(stack, request)) == len(finals(stack, request)) == 1


async def test_the_client_leaves_while_it_still_waits(gateway: Gateway, stack: Stack) -> None:
    stack.engine("decode_tps=20,prefill_tps=0,rows=1", pool="busy")
    async with gateway.async_client("alpha") as other, gateway.async_client("delta") as client:
        running = await start(other, model="busy")
        asking = asyncio.create_task(client.post("/chat/completions", json={**ASK, "model": "busy"}))
        await until(lambda: held(stack, "delta"))
        (request,) = (r.decode() for r in held(stack, "delta"))

        async def leave() -> None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        await gone(stack, "delta", leave)
        assert not stack.redis.exists(f"{stack.prefix}req:{request}")
        await until(lambda: outcomes(stack, request))
        assert finals(stack, request) == [], "nothing was computed, so there is nothing to bill"
        await running.aclose()


async def test_an_engine_is_killed_during_streams_and_before_an_answer(gateway: Gateway, stack: Stack) -> None:
    engine = stack.engine("decode_tps=20,prefill_tps=0", pool="doomed")
    async with gateway.async_client() as client:
        streams = [await start(client, model="doomed") for _ in range(3)]
        whole = asyncio.create_task(
            client.post("/chat/completions", json={**ASK, "model": "doomed", "max_tokens": 5000})
        )
        # What the engine has not pulled yet does not die with it.
        (name,) = (found.decode() for found in stack.redis.zrange(f"{stack.prefix}engines:doomed", 0, -1))
        await until(lambda: stack.redis.scard(f"{stack.prefix}engreq:{name}") == 4)
        engine.child.send_signal(signal.SIGKILL)
        async with asyncio.timeout(20):
            bodies = [(await s.aread()).decode() for s in streams]
            check(await whole, 503, "engine_lost")
    for body in bodies:
        assert "[DONE]" not in body and events(body)[-1]["error"]["code"] == "engine_lost"
    for request in [s.headers["x-request-id"] for s in streams]:
        await until(lambda r=request: outcomes(stack, r) and finals(stack, r))
        (outcome,), (final,) = outcomes(stack, request), finals(stack, request)
        assert final.reason == "lost" and final.completion_tokens >= outcome.delivered_tokens > 0
        assert outcome.code == "engine_lost"
    assert open_requests(stack, "alpha") == 0


async def test_a_sequence_that_fails_alone(gateway: Gateway, stack: Stack) -> None:
    stack.engine("decode_tps=50,prefill_tps=0,fail_after=5,on=poison", pool="faulty")
    async with gateway.async_client() as client:
        bad = {**ASK, "model": "faulty", "messages": [{"role": "user", "content": "poison"}]}
        response = await client.post("/chat/completions", json=bad)
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        body = (await client.post("/chat/completions", json={**bad, "stream": True})).text
        assert "error" in events(body)[-1] and "[DONE]" not in body
        assert (await client.post("/chat/completions", json={**ASK, "model": "faulty"})).status_code == 200


async def test_a_wipe_of_redis_ends_what_was_in_flight_and_the_next_request_works(
    tmp_path: Any, gateway: Gateway
) -> None:
    stack = gateway.stack
    engine = stack.engine("decode_tps=20,prefill_tps=0", pool="wiped")
    async with gateway.async_client() as client:
        running = await start(client, model="wiped")
        for key in list(stack.redis.scan_iter(match=f"{stack.prefix}*", count=1000)):
            stack.redis.delete(key)
        async with asyncio.timeout(10):
            body = (await running.aread()).decode()
        assert events(body)[-1].get("error", {}).get("code") in ("queue_lost", "engine_lost"), body[-300:]
        async with asyncio.timeout(15):
            for pool in ("wiped", POOL):
                while (response := await client.post("/chat/completions", json={**ASK, "model": pool})).is_error:
                    assert response.status_code == 503 and response.headers["x-should-retry"] == "true", response.text
                    await asyncio.sleep(0.1)
    engine.stop()


async def test_a_gateway_that_stops_ends_its_streams_and_frees_everything(stack: Stack, gateway: Gateway) -> None:
    other = stack.gateway()
    async with other.async_client("delta") as client:
        running = await start(client)
        other.process.child.send_signal(signal.SIGTERM)
        try:
            await running.aread()
        except httpx.TransportError:
            pass
    assert other.process.child.wait(10) in (0, -signal.SIGTERM)
    await until(lambda: open_requests(stack, "delta") == 0, 2.0)
    request = running.headers["x-request-id"]
    assert len(outcomes(stack, request)) == 1


async def test_a_killed_gateways_requests_are_stopped(stack: Stack, gateway: Gateway) -> None:
    other = stack.gateway()
    async with other.async_client("delta") as client:
        running = await start(client)
        other.process.child.kill()
        request = running.headers["x-request-id"]
        await until(lambda: open_requests(stack, "delta") == 0, 8.0)
        await until(lambda: finals(stack, request))
        assert [f.reason for f in finals(stack, request)] == ["abort"]


async def test_a_client_that_does_not_read_ends_alone(gateway: Gateway, stack: Stack) -> None:
    stack.engine("decode_tps=0,prefill_tps=0", pool="flood")
    async with gateway.async_client() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = httpx.Request(
            "POST",
            gateway.base + "/chat/completions",
            json={**ASK, "model": "flood", "stream": True, "max_tokens": 30_000},
        ).content
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.keys['delta']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: held(stack, "delta"))
        (request,) = (r.decode() for r in held(stack, "delta"))
        assert (await client.post("/chat/completions", json=ASK)).status_code == 200
        await until(lambda: open_requests(stack, "delta") == 0, 20)
        await until(lambda: outcomes(stack, request))
        assert outcomes(stack, request)[0].code == "slow_client"
        writer.close()
        reader.feed_eof()
