"""The official Python client against the running data plane: nothing but base URL and key is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.harness import POOL, Gateway

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def ai(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=gateway.base, api_key=gateway.stack.keys["alpha"], max_retries=0) as client:
        yield client


def test_a_whole_answer(ai: OpenAI) -> None:
    answer = ai.chat.completions.create(model=POOL, messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content and answer.usage and answer.usage.completion_tokens == 8
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.content or []) == 8
    assert answer._request_id and answer.id.endswith(answer._request_id)


def test_a_stream_with_usage(ai: OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(
        ai.chat.completions.create(model=POOL, messages=MESSAGES, max_tokens=8, stream=True, stream_options=options)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) != ""
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 8


def test_the_streaming_helper(ai: OpenAI) -> None:
    with ai.chat.completions.stream(model=POOL, messages=MESSAGES, max_tokens=40, stop=[" "]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert len(final.choices[0].message.content or "") == 5 and final.choices[0].finish_reason == "stop"


async def test_many_async_streams(gateway: Gateway) -> None:
    async with AsyncOpenAI(base_url=gateway.base, api_key=gateway.stack.keys["alpha"]) as ai:

        async def one(seed: int) -> str:
            stream = await ai.chat.completions.create(
                model=POOL, messages=MESSAGES, max_tokens=20, stream=True, seed=seed
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        texts = await asyncio.gather(*(one(i % 4) for i in range(16)))
    assert all(texts[i] == texts[i % 4] and len(texts[i]) == 20 for i in range(16))


def test_completions_and_models(ai: OpenAI) -> None:
    answer = ai.completions.create(model=POOL, prompt=["a", "b"], max_tokens=4)
    assert [c.index for c in answer.choices] == [0, 1]
    assert POOL in [m.id for m in ai.models.list()] and ai.models.retrieve(POOL).id == POOL


def test_errors_are_the_clients_own(ai: OpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ai.chat.completions.create(model="none", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        ai.chat.completions.create(model=POOL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=gateway.base, api_key="sk-wrong").models.list()
    with pytest.raises(openai.RateLimitError) as poor:  # told not to retry, so it does not
        OpenAI(base_url=gateway.base, api_key=gateway.stack.keys["prepaid"], max_retries=5).chat.completions.create(
            model=POOL, messages=MESSAGES
        )
    assert poor.value.code == "insufficient_quota"


def test_a_failure_in_the_middle_of_a_stream_is_raised(ai: OpenAI, gateway: Gateway) -> None:
    gateway.stack.engine("decode_tps=50,prefill_tps=0,fail_after=5", pool="breaks")
    with pytest.raises(openai.APIError) as broken:
        for _ in ai.chat.completions.create(model="breaks", messages=MESSAGES, stream=True):
            pass
    assert "could not finish" in broken.value.message
