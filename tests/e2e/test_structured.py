"""Answers in a given form and tool calls, through the official client on the real model."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError
from pydantic import BaseModel, Field

from tests.e2e.stack import Stack

MODEL = "smollm2-135m"
ASK: list[Any] = [{"role": "user", "content": "Describe a person as JSON."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["froh", "müde", None]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ping"}},
]


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Ball(BaseModel):
    colour: Colour
    size: int
    label: str = Field(max_length=8)


def schema(value: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": value, "strict": True}}


def test_what_ends_by_itself_is_valid_greedy_and_drawn(stack: Stack) -> None:
    valid, ended = Draft202012Validator(PERSON), 0
    for temperature, n in ((0.0, 1), (1.0, 3)):
        answer = stack.client().chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=64,
            temperature=temperature,
            n=n,
            seed=4,
            response_format=schema(PERSON),
        )
        for choice in answer.choices:
            if choice.finish_reason == "stop":
                valid.validate(json.loads(choice.message.content or ""))
                ended += 1
    assert ended >= 2


def test_parse_gives_an_object_of_the_clients_own_type(stack: Stack) -> None:
    answer = stack.client().chat.completions.parse(
        model=MODEL, messages=ASK, max_tokens=64, temperature=0, response_format=Ball
    )
    ball = answer.choices[0].message.parsed
    assert isinstance(ball, Ball) and len(ball.label) <= 8


def test_a_stream_is_the_same_and_log_probabilities_are_the_models(stack: Stack) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "max_tokens": 48,
        "temperature": 0,
        "response_format": schema(PERSON),
    }
    whole = stack.client().chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    with stack.client().chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == whole.message.content and final.finish_reason == whole.finish_reason
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert all(token.logprob <= 0 for token in whole.logprobs.content)


def test_the_extension_on_both_routes(stack: Stack) -> None:
    client = stack.client()
    how: dict[str, Any] = {"structured_outputs": {"regex": r"[A-Z]{2}-\d{3}"}}
    text = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20, extra_body=how).choices[0]
    assert text.message.content and len(text.message.content) == 6 and text.finish_reason == "stop"
    how = {"structured_outputs": {"choice": ["blau", "grün"]}}
    colours = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=20, n=4, extra_body=how)
    assert {c.text for c in colours.choices} <= {"blau", "grün"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_valid(stack: Stack, choice: Any) -> None:
    answer = stack.client().chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=100, n=2
    )
    for c in answer.choices:
        assert c.finish_reason == "tool_calls" and c.message.content is None
        assert c.message.tool_calls is not None and len(c.message.tool_calls) == 1
        function = c.message.tool_calls[0].function  # type: ignore[union-attr]
        arguments = json.loads(function.arguments)
        if function.name == "get_weather":
            Draft202012Validator(WEATHER).validate(arguments)
        else:
            assert function.name == "ping" and arguments == {} and choice == "required"


def test_a_streamed_call_has_its_name_first_and_parses(stack: Stack) -> None:
    tools = [openai.pydantic_function_tool(Ball)]
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 100, "temperature": 0}
    deltas = []
    with stack.client().chat.completions.stream(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                deltas += event.chunk.choices[0].delta.tool_calls or []
        final = stream.get_final_completion().choices[0]
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "Ball"
    assert all(d.id is None and d.index == 0 for d in deltas[1:]) and len(deltas) > 3
    assert final.finish_reason == "tool_calls" and final.message.tool_calls
    assert isinstance(final.message.tool_calls[0].function.parsed_arguments, Ball)


def test_a_conversation_goes_on_with_the_result(stack: Stack) -> None:
    client = stack.client()
    first = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100
    )
    call = first.choices[0].message.tool_calls[0]  # type: ignore[index]
    said: list[Any] = [*ASK, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "18 °C"}]
    second = client.chat.completions.create(model=MODEL, messages=said, tools=TOOLS, max_tokens=12)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    assert second.usage and first.usage and second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": schema({"uniqueItems": True})}, "schema.uniqueItems", "not supported"),
        ({"response_format": schema({"enum": []})}, "schema", "nsatisfiable"),
        ({"response_format": schema({"$ref": "#/$defs/gone"})}, "schema", "does not exist"),
        ({"extra_body": {"structured_outputs": {"regex": "(?=a)b"}}}, "structured_outputs.regex", "look-around"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: gone"}}}, "structured_outputs.grammar", "gone"),
    ],
)
def test_what_can_not_be_enforced_is_refused_before_any_byte(
    stack: Stack, fields: dict[str, Any], param: str, says: str
) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError) as refused:
            stack.client().chat.completions.create(model=MODEL, messages=ASK, max_tokens=5, stream=stream, **fields)
        assert refused.value.code == "invalid_grammar" and (refused.value.param or "").endswith(param)
        assert says in refused.value.message


def test_a_reference_into_a_tuple_is_followed(stack: Stack) -> None:
    """In the tuple's older form, which the server rewrites."""
    pair = {"type": "array", "items": [{"enum": ["x"]}, {"type": "boolean"}], "minItems": 2, "additionalItems": False}
    parts = {"pair": pair, "again": {"$ref": "#/properties/pair/items/0"}}
    wanted = schema({"type": "object", "properties": parts, "required": ["pair", "again"]})
    answer = stack.client().chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=60, temperature=0, response_format=wanted
    )
    said = json.loads(answer.choices[0].message.content or "")
    assert said["pair"][0] == said["again"] == "x" and type(said["pair"][1]) is bool


def test_one_tenants_slow_grammar_holds_up_nobody(stack: Stack) -> None:
    """A schema that takes too long is refused; meanwhile a plain request of another tenant streams on."""
    huge = schema({"enum": [f"{i}" * 9 for i in range(12_000)]})
    asking = stack.client("beta")
    stream = stack.client().chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
    chunks = iter(stream)
    next(chunks)
    try:
        asking.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, response_format=huge)
    except BadRequestError as refused:
        assert refused.code == "invalid_grammar"
    assert sum(1 for _ in chunks) >= 1
