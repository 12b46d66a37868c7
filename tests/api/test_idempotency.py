"""Idempotency-Key: the same request twice is computed and billed once; another body under the key is refused."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest

from tests.admission.test_limits import start, until
from tests.api.test_chat import ASK
from tests.api.test_errors import check
from tests.dispatch.test_ends import finals
from tests.harness import Gateway


def post(client: httpx.Client, key: str, **fields: Any) -> httpx.Response:
    return client.post("/chat/completions", json={**ASK, **fields}, headers={"idempotency-key": key})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_twice(gateway: Gateway, stream: bool) -> None:
    key = secrets.token_hex(8)
    with gateway.client() as client:
        first, second = post(client, key, stream=stream), post(client, key, stream=stream)
        assert first.status_code == second.status_code == 200
        assert second.content == first.content and second.headers["content-type"] == first.headers["content-type"]
        assert second.headers["idempotency-replayed"] == "true" and "idempotency-replayed" not in first.headers
        check(post(client, key, stream=stream, max_tokens=13), 422, "idempotency_conflict")
    await until(lambda: finals(gateway.stack, first.headers["x-request-id"]))
    assert not finals(gateway.stack, second.headers["x-request-id"])


def test_a_key_is_the_tenants_own(gateway: Gateway) -> None:
    key = secrets.token_hex(8)
    with gateway.client() as alpha, gateway.client("beta") as beta:
        assert post(alpha, key).json()["id"] != post(beta, key).json()["id"]


async def test_in_flight_is_a_conflict_and_what_failed_may_be_tried_again(gateway: Gateway) -> None:
    key = secrets.token_hex(8)
    async with gateway.async_client("delta") as client:
        client.headers["idempotency-key"] = key
        running = await start(client)
        body = {**ASK, "stream": True, "max_tokens": 5000}
        check(await client.post("/chat/completions", json=body), 409, "idempotency_in_flight")
        await running.aclose()
        claim = f"{gateway.stack.prefix}idem:delta:{key}"
        await until(lambda: not gateway.stack.redis.exists(claim))
        again = await start(client)
        await again.aclose()


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
def test_a_malformed_key(gateway: Gateway, key: str) -> None:
    with gateway.client() as client:
        check(post(client, key), 400, "invalid_value")
