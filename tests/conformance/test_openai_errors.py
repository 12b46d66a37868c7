"""Every error class of the official Python client, its retries and its timeouts, against the running data plane."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai import _base_client as client_module

from tests.harness import POOL, Gateway

MESSAGES = [{"role": "user", "content": "Hi"}]
Opener = Callable[..., OpenAI]


@pytest.fixture
def attempts() -> list[str]:
    """The request ids of every attempt, as the server answered them."""
    return []


@pytest.fixture
def opened(gateway: Gateway, attempts: list[str]) -> Iterator[Opener]:
    """A client of a tenant that notes each attempt, whichever HTTP library it uses."""
    clients: list[OpenAI] = []

    def make(tenant: str = "alpha", retries: int = 0, **options: object) -> OpenAI:
        made = OpenAI(base_url=gateway.base, api_key=gateway.stack.keys[tenant], max_retries=retries, **options)  # type: ignore[arg-type]
        made._client.event_hooks = {"response": [lambda r: attempts.append(r.headers.get("x-request-id", ""))]}
        clients.append(made)
        return made

    yield make
    for each in clients:
        each.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's waits between attempts: noted, not waited for."""
    waits: list[float] = []

    clock = SimpleNamespace(**vars(time) | {"sleep": waits.append})
    monkeypatch.setattr(client_module, "time", clock)
    return waits


def test_400(opened: Opener) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        opened().chat.completions.create(model=POOL, messages=MESSAGES, temperature=9)
    error = caught.value
    assert (error.status_code, error.code, error.param, error.type) == (
        400,
        "invalid_value",
        "temperature",
        "invalid_request_error",
    )
    assert error.request_id


def test_401(opened: Opener) -> None:
    for tenant in ("expired", "revoked", "suspended"):
        with pytest.raises(openai.AuthenticationError) as caught:
            opened(tenant).models.list()
        assert caught.value.code in ("api_key_expired", "invalid_api_key")


def test_403(opened: Opener) -> None:
    for tenant in ("no-scope", "elsewhere"):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            opened(tenant).chat.completions.create(model=POOL, messages=MESSAGES)
        assert caught.value.type == "permission_error"


def test_404(opened: Opener) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        opened().models.retrieve("none")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        opened().post("/nothing/here", cast_to=object)


def test_409_and_422_of_one_idempotency_key(opened: Opener) -> None:
    headers = {"Idempotency-Key": "conformance-1"}
    ai = opened()
    with ai.chat.completions.create(
        model=POOL, messages=MESSAGES, max_tokens=400, stream=True, extra_headers=headers
    ) as stream:
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as caught:
            ai.chat.completions.create(
                model=POOL, messages=MESSAGES, max_tokens=400, stream=True, extra_headers=headers
            )
        assert caught.value.code == "idempotency_in_flight"
        with pytest.raises(openai.UnprocessableEntityError) as other:
            ai.chat.completions.create(model=POOL, messages=MESSAGES, max_tokens=401, extra_headers=headers)
        assert other.value.code == "idempotency_conflict"


def test_429_waits_as_told_and_tries_again(opened: Opener, attempts: list[str], pauses: list[float]) -> None:
    ai = opened("told-to-wait", retries=2)
    for _ in range(3):
        ai.chat.completions.create(model=POOL, messages=MESSAGES, max_tokens=1)
    attempts.clear()
    with pytest.raises(openai.RateLimitError) as caught:
        ai.chat.completions.create(model=POOL, messages=MESSAGES, max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    told = int(caught.value.response.headers["retry-after"])
    # One request in 20 seconds: what the server said is what the client did, not its own back-off of a second.
    assert len(attempts) == 3 and len(set(attempts)) == 3
    assert len(pauses) == 2 and all(told <= pause <= 20 for pause in pauses)


def test_429_that_no_waiting_cures_is_tried_once(opened: Opener, attempts: list[str], pauses: list[float]) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        opened("prepaid", retries=5).chat.completions.create(model=POOL, messages=MESSAGES)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(attempts) == 1 and pauses == []


def test_503_is_tried_again(opened: Opener, gateway: Gateway, attempts: list[str], pauses: list[float]) -> None:
    gateway.stack.engine("decode_tps=50,prefill_tps=0,fail_after=1", pool="fails-early")
    with pytest.raises(openai.InternalServerError) as caught:
        opened(retries=1).chat.completions.create(model="fails-early", messages=MESSAGES)
    assert caught.value.status_code >= 500 and caught.value.response.headers["x-should-retry"] == "true"
    assert len(attempts) == 2 and len(pauses) == 1


def test_a_timeout_stops_the_request(opened: Opener, gateway: Gateway) -> None:
    gateway.stack.engine("decode_tps=5,prefill_tps=0", pool="slow")
    with pytest.raises(openai.APITimeoutError):
        opened(timeout=0.5).chat.completions.create(model="slow", messages=MESSAGES, max_tokens=500)


def test_nobody_there() -> None:
    with pytest.raises(openai.APIConnectionError):
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="sk-x", max_retries=0).models.list()


async def test_async_errors_and_raw_answers(gateway: Gateway) -> None:
    async with AsyncOpenAI(base_url=gateway.base, api_key=gateway.stack.keys["alpha"], max_retries=0) as ai:
        with pytest.raises(openai.NotFoundError):
            await ai.chat.completions.create(model="none", messages=MESSAGES)
        raw = await ai.chat.completions.with_raw_response.create(model=POOL, messages=MESSAGES, max_tokens=3)
        assert raw.headers["x-request-id"] == raw.request_id
        completion = raw.parse()
        assert json.loads(raw.http_response.text)["id"] == completion.id and completion.usage
        page = await ai.models.list()
        assert POOL in [model.id async for model in page]
