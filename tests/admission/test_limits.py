"""Limits through HTTP: refused with the right word, and nothing consumed by a refusal."""

from __future__ import annotations

import asyncio
import time
from decimal import Decimal
from typing import Any

import httpx
import pytest

from engine.protocol.messages import Refusal, decode
from tests.api.test_chat import ASK, ask
from tests.api.test_errors import check
from tests.harness import Gateway, Stack


@pytest.fixture(scope="module")
def slow_pool(stack: Stack) -> str:
    """An engine with one row and about 20 tokens a second."""
    stack.engine("decode_tps=20,prefill_tps=0,rows=1", pool="one-row")
    return "one-row"


async def until(condition: Any, limit_s: float = 5.0) -> None:
    """Wait for something of another process that has no event to wait for."""
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        await asyncio.sleep(0.02)


def open_requests(stack: Stack, tenant: str) -> int:
    return stack.redis.scard(f"{stack.prefix}open:{tenant}")


async def start(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """An open stream whose first event has arrived."""
    request = client.build_request(
        "POST", "/chat/completions", json={**ASK, "stream": True, "max_tokens": 5000, **fields}
    )
    response = await client.send(request, stream=True)
    assert response.status_code == 200, await response.aread()
    return response


async def test_two_at_once_and_a_third_after_a_reset(gateway: Gateway) -> None:
    async with gateway.async_client("two-at-once") as client:
        first, second = await start(client), await start(client)
        response = await client.post("/chat/completions", json=ASK)
        check(response, 429, "concurrency_limit")
        assert response.headers["x-should-retry"] == "true"
        await first.aclose()
        await second.aclose()
        await until(lambda: open_requests(gateway.stack, "two-at-once") == 0, 3.0)
        assert (await client.post("/chat/completions", json=ASK)).status_code == 200


def test_a_fault_of_ours_in_redis_is_no_outage(gateway: Gateway) -> None:
    redis, bucket = gateway.stack.redis, f"{gateway.stack.prefix}rl:broken:requests"
    redis.set(bucket, "of another type than the functions expect")
    try:
        with gateway.client("broken") as client:
            response = ask(client)
            check(response, 500, "internal_error")
            assert "retry-after" not in response.headers
            redis.delete(bucket)
            assert ask(client).status_code == 200
    finally:
        redis.delete(bucket)
    assert open_requests(gateway.stack, "broken") == 0
    assert "WRONGTYPE" in gateway.process.log.read_text()


async def test_a_full_queue_of_one_tenant(gateway: Gateway, slow_pool: str) -> None:
    async with gateway.async_client("few-waiting") as client:
        running = await start(client, model=slow_pool)
        waiting = [
            asyncio.create_task(client.post("/chat/completions", json={**ASK, "model": slow_pool})) for _ in range(3)
        ]
        depth = f"{gateway.stack.prefix}depth:{slow_pool}"
        await until(lambda: gateway.stack.redis.hget(depth, "standard:few-waiting") == b"3")
        check(await client.post("/chat/completions", json={**ASK, "model": slow_pool}), 429, "tenant_queue_full")
        await running.aclose()
        assert {r.status_code for r in await asyncio.gather(*waiting)} == {200}


async def test_a_sheddable_tier_is_refused_before_its_deadline_is_lost(gateway: Gateway, slow_pool: str) -> None:
    redis, prefix = gateway.stack.redis, gateway.stack.prefix
    drain, jobs = f"{prefix}drain:{slow_pool}", {**ASK, "model": slow_pool, "service_tier": "batch"}
    async with gateway.async_client("few-waiting") as client:
        running = await start(client, model=slow_pool)
        try:
            waiting = [asyncio.create_task(client.post("/chat/completions", json=jobs))]
            await until(lambda: redis.hget(f"{prefix}depth:{slow_pool}", "batch:few-waiting") == b"1")
            # As if its jobs had been started 61 s apart: more than the tier's target of 60 s.
            redis.hset(drain, mapping={"batch:gap": "61000", "batch:last": str(int(1000 * time.time()))})
            refused = await client.post("/chat/completions", json=jobs)
            check(refused, 503, "tier_queue_full")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            others = {**jobs, "service_tier": "auto"}
            waiting.append(asyncio.create_task(client.post("/chat/completions", json=others)))
            await until(lambda: redis.hget(f"{prefix}depth:{slow_pool}", "standard:few-waiting") == b"1")
        finally:
            redis.hdel(drain, "batch:gap", "batch:last")
            await running.aclose()
        assert {r.status_code for r in await asyncio.gather(*waiting)} == {200}


def test_a_request_rate(gateway: Gateway) -> None:
    with gateway.client("three-a-minute") as client:
        for left in (2, 1, 0):
            response = ask(client)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "3"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        response = ask(client)
        check(response, 429, "rate_limit_exceeded")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        # What is refused for another reason takes nothing from the bucket either, as the count above shows.
        assert ask(client, n=0).status_code == 400


def test_a_token_rate_counts_what_may_be_made(gateway: Gateway) -> None:
    with gateway.client("few-tokens") as client:
        response = ask(client, max_tokens=5000)
        check(response, 429, "rate_limit_exceeded")
        assert "retry-after" not in response.headers, "it can never pass"
        assert ask(client, max_tokens=100).status_code == 200


def test_a_prepaid_balance_of_nothing_buys_nothing(gateway: Gateway) -> None:
    with gateway.client("prepaid") as client:
        response = ask(client)
        check(response, 429, "insufficient_quota")
        assert response.headers["x-should-retry"] == "false"


def test_the_money_is_held_for_every_answer_asked_for(gateway: Gateway) -> None:
    """What pays for one answer and a half buys one, and not two of which one is never paid."""
    with gateway.client("alpha") as client:
        timing = ask(client, max_tokens=40, messages=[{"role": "user", "content": "Not asked before"}])
    cost = Decimal(timing.headers["server-timing"].partition('cost;desc="')[2].split()[0])
    amount = (cost * 3 / 2).quantize(Decimal("1e-9"))
    paid = f"top_up(actor, Tenant.objects.get(slug='few-cents'), Decimal('{amount}'), 'test')"
    gateway.stack.change(f"from decimal import Decimal; from tenants.billing.services import top_up; {paid}")
    with gateway.client("few-cents") as client:
        said = {"max_tokens": 40, "messages": [{"role": "user", "content": "Not asked before"}]}
        check(ask(client, n=2, **said), 429, "insufficient_quota")
        assert ask(client, **said).status_code == 200


async def test_no_engine(gateway: Gateway) -> None:
    stack = gateway.stack
    engine = stack.engine("decode_tps=100", pool="short-lived")
    with gateway.client() as client:
        assert ask(client, model="short-lived").status_code == 200
        assert engine.stop() == 0
        response = ask(client, model="short-lived")
        check(response, 503, "no_engine")
        assert response.headers["x-should-retry"] == "true"


async def test_refusals_are_kept_with_their_reason(gateway: Gateway) -> None:
    stack = gateway.stack
    with gateway.client() as client:
        response = ask(client, model="not-there")
    request = response.headers["x-request-id"]

    def kept() -> list[Refusal]:
        entries = stack.redis.xrevrange(f"{stack.prefix}refusals", count=50)
        return [r for r in (decode(f[b"r"], Refusal) for _, f in entries) if r.request == request]

    await until(kept)
    (refusal,) = kept()
    assert (refusal.tenant, refusal.status, refusal.code, refusal.model) == (
        "alpha",
        404,
        "model_not_found",
        "not-there",
    )


async def test_a_deadline_ends_what_still_waits(gateway: Gateway, slow_pool: str) -> None:
    async with gateway.async_client() as client:
        running = await start(client, model=slow_pool)
        response = await client.post("/chat/completions", json={**ASK, "model": slow_pool, "deadline_ms": 300})
        check(response, 503, "queue_timeout")
        await running.aclose()
