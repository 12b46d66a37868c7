"""The official Python client's parsing, tools and embeddings against a server with real models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.conformance.conftest import Served

pytestmark = pytest.mark.slow
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """An answer with a bound on everything, so that a small model comes to an end."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-40, le=50)
    clear: bool


class GetWeather(BaseModel):
    """Tells the weather."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


TOOL = pydantic_function_tool(GetWeather, name="get_weather")


@pytest.fixture(scope="module")
def ai(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.base, api_key=served.key, timeout=240) as client:
        yield client


@pytest.fixture
async def aio(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=served.base, api_key=served.key, timeout=240) as client:
        yield client


def test_parse(ai: OpenAI, served: Served) -> None:
    answer = ai.chat.completions.parse(model=served.model, messages=MESSAGES, response_format=Weather, seed=1)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Weather) and -40 <= parsed.degrees <= 50
    assert answer.choices[0].finish_reason == "stop"


async def test_parse_while_it_streams(aio: AsyncOpenAI, served: Served) -> None:
    async with aio.chat.completions.stream(
        model=served.model, messages=MESSAGES, response_format=Weather, seed=2
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


def test_a_tool_is_called_and_its_result_taken(ai: OpenAI, served: Served) -> None:
    called = ai.chat.completions.parse(
        model=served.model, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=3
    )
    choice = called.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and isinstance(call.function.parsed_arguments, GetWeather)
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21, "sky": "clear"})}
    spoken = choice.message.model_dump(include={"role", "content", "tool_calls"})
    for each in spoken["tool_calls"]:
        each["function"].pop("parsed_arguments", None)
    after = ai.chat.completions.create(
        model=served.model, messages=[*MESSAGES, spoken, result], tools=[TOOL], tool_choice="none", max_tokens=12
    )
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls


def test_a_tool_call_streams(ai: OpenAI, served: Served) -> None:
    with ai.chat.completions.stream(
        model=served.model,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        seed=4,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_embeddings_in_both_encodings(ai: OpenAI, served: Served) -> None:
    texts = ["a cat", "a kitten", "interest rates"]
    packed = ai.embeddings.create(model=served.embedding_model, input=texts)  # asks for base64
    plain = ai.embeddings.create(model=served.embedding_model, input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)

    def likeness(a: int, b: int) -> float:
        return sum(x * y for x, y in zip(plain.data[a].embedding, plain.data[b].embedding, strict=True))

    assert likeness(0, 1) > likeness(0, 2)
