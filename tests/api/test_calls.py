"""Tool calls read from text: the same whatever the text is cut into, and nothing lost when there were none."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.grammar import COMMON
from gateway.api.calls import CallReader
from gateway.api.schemas.chat import ChatRequest
from gateway.errors import ApiError

NAMES = ("f", "get_weather", "h-2")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[]<>é ', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"}', max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALL = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text("ab"), JSON))
CALLS = st.lists(CALL, max_size=3)
PROSE = st.text("ab <t{o\n", max_size=12).filter(lambda text: text.strip() and not text.lstrip().startswith("{"))
fixed = settings(derandomize=True, deadline=None, max_examples=200)


def read(
    text: str, cuts: list[int], *, bare: bool = True, many: bool = True
) -> tuple[str, list[dict[str, Any]], CallReader]:
    reader, shown, deltas = CallReader(NAMES, bare=bare, many=many, seed="s"), "", []
    for a, b in pairwise([0, *sorted(cuts), len(text)]):
        piece, calls = reader.push(text[a:b])
        shown += piece
        deltas += calls
    return shown + reader.flush(), deltas, reader


def joined(deltas: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """As a client puts them together: by index, the id and the name first, then pieces of arguments."""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if delta["index"] not in calls:
            assert delta["id"].startswith("call_") and delta["type"] == "function"
            calls[delta["index"]] = [delta["function"]["name"], ""]
        else:
            assert "id" not in delta and "name" not in delta["function"]
        calls[delta["index"]][1] += delta["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def cuts(data: st.DataObject, text: str) -> list[int]:
    return data.draw(st.lists(st.integers(0, len(text)), max_size=12))


def written(call: tuple[str, Any], indent: int | None = None) -> str:
    return json.dumps({"name": call[0], "arguments": call[1]}, ensure_ascii=False, indent=indent)


@fixed
@given(call=CALL, indent=st.none() | st.just(2), key=st.sampled_from(["arguments", "parameters"]), data=st.data())
def test_a_bare_call(call: tuple[str, Any], indent: int | None, key: str, data: st.DataObject) -> None:
    text = " \n" + json.dumps({"type": "function", "name": call[0], key: call[1]}, indent=indent) + "\n"
    shown, deltas, reader = read(text, cuts(data, text))
    assert joined(deltas) == [call] and shown == ""
    assert [c.whole()["function"]["name"] for c in reader.calls] == [call[0]]


@fixed
@given(calls=CALLS, before=PROSE, bare=st.booleans(), data=st.data())
def test_marked_calls_after_text(calls: list[tuple[str, Any]], before: str, bare: bool, data: st.DataObject) -> None:
    text = before + "".join(f"<tool_call>\n{written(c)}\n</tool_call>\n" for c in calls)
    shown, deltas, _ = read(text, cuts(data, text), bare=bare)
    assert shown == before and joined(deltas) == calls


@fixed
@given(call=CALL, data=st.data())
def test_the_order_of_the_keys_and_the_form_of_the_arguments(call: tuple[str, Any], data: st.DataObject) -> None:
    turned = json.dumps({"arguments": call[1], "id": 7, "name": call[0]})
    quoted = json.dumps({"name": call[0], "arguments": json.dumps(call[1])})
    text = f"<tool_call>{turned}</tool_call><tool_call>{quoted}</tool_call>"
    shown, deltas, _ = read(text, cuts(data, text))
    assert shown == "" and joined(deltas) == [call, call]


@fixed
@given(text=st.text('<tool_cal>/{}"na me:,\n', max_size=40), data=st.data())
def test_text_that_is_no_call_is_shown_whole(text: str, data: st.DataObject) -> None:
    shown, deltas, reader = read(text, cuts(data, text))
    assert not deltas and not reader.calls and shown == text


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Paris", "name": "f"}',
        '{"name": "unknown", "arguments": {}}',
        '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call> then text',
        "<tool_call>nothing of the kind</tool_call>",
        '<tool_call>{"name": "f"',
        "a < b and <tool_",
        '{"name": "f", "arguments"',
        "  \n ",
        "[1, 2]",
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    for cut in range(len(text) + 1):
        shown, deltas, reader = read(text, [cut])
        assert (shown, deltas, reader.calls) == (text, [], [])


def test_one_call_alone_when_several_are_not_wanted() -> None:
    text = "".join(f"<tool_call>{written(('f', {'n': n}))}</tool_call>" for n in range(3)) + "and more"
    for cut in range(len(text)):
        shown, deltas, _ = read(text, [cut], many=False)
        assert shown == "" and joined(deltas) == [("f", {"n": 0})]


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(NAMES, bare=True, many=True, seed="s")
    text = '{"name": "f", "arguments": {"a": 1}}'
    pieces = [reader.push(c)[1] for c in text]
    # The name with the first character of the arguments, then each character as it comes.
    assert [len(p) for p in pieces] == [0] * text.index('{"a"') + [2] + [1] * 7 + [0]
    assert "".join(d["function"]["arguments"] for p in pieces for d in p) == '{"a": 1}'


def test_without_arguments_they_are_empty_and_ids_are_the_same_when_read_again() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f", "arguments": null}</tool_call>'
    _, deltas, reader = read(text, [])
    assert joined(deltas) == [("f", {}), ("f", {})]
    assert [c.id for c in read(text, [20])[2].calls] == [c.id for c in reader.calls]
    assert len({c.id for c in reader.calls}) == 2


# What a request comes to ---------------------------------------------------------------------------------------------


def request(**fields: Any) -> ChatRequest:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "g"}},
    ]
    messages = [{"role": "user", "content": "x"}]
    body = msgspec.convert({"model": "m", "messages": messages, "tools": tools, **fields}, ChatRequest)
    body.check()
    return body


def lark(body: ChatRequest) -> str:
    wanted = body.constraint(body.calling())
    assert wanted is not None and wanted.constraint["kind"] == "lark"
    return str(wanted.constraint["lark"])


def test_none_and_auto_force_nothing() -> None:
    assert request(tool_choice="none").calling() is None
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        calls = request(**choice).calling()
        assert calls is not None and calls.names == {"f", "g"} and not calls.forced and calls.many
        assert request(**choice).constraint(calls) is None


def test_required_allows_every_tool_and_a_name_only_that_one() -> None:
    assert all(name in lark(request(tool_choice="required")) for name in ('\\"f\\"', '\\"g\\"', "{0,15}"))
    assert "{0,15}" not in lark(request(tool_choice="required", parallel_tool_calls=False))
    named = lark(request(tool_choice={"type": "function", "function": {"name": "g"}}))
    assert '\\"g\\"' in named and '\\"f\\"' not in named and "{0,15}" not in named
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert '\\"g\\"' not in lark(request(tool_choice={"type": "allowed_tools", "allowed_tools": some}))


def test_a_format_holds_for_the_answer_that_is_no_call() -> None:
    text = lark(request(response_format={"type": "json_object"}))
    assert text.startswith("start: calls | content")


def test_what_is_compiled_beforehand_is_what_a_request_for_json_asks_for() -> None:
    wanted = request(tools=None, response_format={"type": "json_object"}).constraint(None)
    assert wanted is not None and wanted.text() == COMMON


def test_a_strict_tool_is_held_to_its_schema_once_a_call_begins() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert "[lazy]" in lark(request(tools=tools))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"tools": None, "structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {}}, "guided_json"),
        ({"grammar": "x"}, "grammar"),
    ],
)
def test_what_can_not_be_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        request(**fields)
    assert refused.value.param == param and refused.value.status == 400


PARAMETERS = "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "where", "says"),
    [
        ({"type": "array"}, "", "type 'object'"),
        ({"properties": {"a": {"uniqueItems": True}}}, ".properties.a.uniqueItems", "uniqueItems"),
        ({"properties": {"a": {"type": "strang"}}}, ".properties.a.type", "'strang'"),
        ({"properties": {"a": {"anyOf": []}}}, ".properties.a.anyOf", "not empty"),
        ({"properties": {"a": 3}}, ".properties.a", "an object or a boolean"),
        ({"properties": []}, ".properties", "an object of schemas"),
        ({"required": "a"}, ".required", "property names"),
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, ".properties.a.$ref", "inside the schema"),
        ({"properties": {"a": {"minLength": -1}}}, ".properties.a.minLength", "not negative"),
        ({"properties": {"a": {"enum": ["x" * 200_000]}}}, "", "128 KiB"),
        ({"properties": {"a": {"items": [{"type": "strang"}]}}}, ".properties.a.items[0].type", "not a type"),
        ({"properties": {"a": {"items": []}}}, ".properties.a.items", "not empty"),
        ({"properties": {"a": {"items": [{}], "prefixItems": [{}]}}}, ".properties.a.items", "'prefixItems'"),
        ({"properties": {"a": {"items": [{}], "additionalItems": [{}]}}}, ".properties.a.additionalItems", "boolean"),
    ],
)
def test_a_schema_that_can_not_be_enforced_says_where_and_why(schema: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(ApiError) as refused:
        request(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert refused.value.param == PARAMETERS + where and says in refused.value.message


def test_a_schema_nested_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ApiError, match="levels deep"):
        request(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": deep}}}}])


def test_keywords_as_names_and_values_are_no_keywords() -> None:
    schema = {"properties": {"not": {"enum": [{"if": 1}]}, "format": {"type": "string", "format": "unheard-of"}}}
    calls = request(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).calling()
    assert calls is not None and calls.functions[0].parameters is not None
    assert calls.functions[0].parameters["properties"]["format"] == {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "additionalProperties": True}, False),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, False),
        ({"properties": {"a": {}}, "minProperties": 2}, False),
        ({"properties": {"a": {"allOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]}}}, False),
        ({"properties": {"a": {"oneOf": [{"properties": {"b": {}}}, {"type": "string"}]}}}, False),
        ({"type": "object"}, False),
    ],
)
def test_objects_with_named_properties_get_no_others(schema: dict[str, Any], closed: bool) -> None:
    calls = request(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).calling()
    assert calls is not None and calls.functions[0].parameters is not None
    assert (calls.functions[0].parameters.get("additionalProperties") is False) == closed


def test_a_list_under_items_is_a_tuple() -> None:
    """As JSON Schema wrote them before 2020, and Pydantic 1 does."""
    pair = {"items": [{"type": "integer"}, {"items": [{"type": "null"}]}], "minItems": 2, "additionalItems": False}
    schema = {"properties": {"pair": pair, "open": {"items": [{"type": "string"}]}}}
    calls = request(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).calling()
    assert calls is not None and calls.functions[0].parameters is not None
    assert calls.functions[0].parameters["properties"] == {
        "pair": {
            "prefixItems": [{"type": "integer"}, {"prefixItems": [{"type": "null"}]}],
            "minItems": 2,
            "items": False,
        },
        "open": {"prefixItems": [{"type": "string"}]},
    }


@pytest.mark.parametrize(
    ("given", "enforced"),
    [
        ("#/properties/pair/items/0", "#/properties/pair/prefixItems/0"),
        ("#/properties/pair/items/1/items/0", "#/properties/pair/prefixItems/1/prefixItems/0"),
        ("#/properties/pair/additionalItems", "#/properties/pair/items"),
        ("#/properties/list/items", "#/properties/list/items"),
        ("#/properties/items/items/0", "#/properties/items/prefixItems/0"),
        ("#/$defs/a~1b/anyOf/0/items/0", "#/$defs/a~1b/anyOf/0/prefixItems/0"),
        ("#/$defs/a%7E1b/anyOf/0/items/0", "#/$defs/a%7E1b/anyOf/0/prefixItems/0"),
        ("#/properties/fixed/const/items/0", "#/properties/fixed/const/items/0"),
        ("#/properties/gone/items/0", "#/properties/gone/items/0"),
        ("#/properties/pair/items/9/items/0", "#/properties/pair/prefixItems/9/items/0"),
        ("#", "#"),
    ],
)
def test_a_reference_into_a_tuple_goes_where_the_tuple_went(given: str, enforced: str) -> None:
    one = {"items": [{"type": "null"}]}
    parts = {
        "pair": {"items": [{"type": "integer"}, one], "additionalItems": {"type": "boolean"}},
        "list": {"items": {"type": "string"}},
        "items": one,
        "fixed": {"const": one},
        "it": {"$ref": given},
    }
    schema = {"properties": parts, "$defs": {"a/b": {"anyOf": [one]}}}
    calls = request(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).calling()
    assert calls is not None and calls.functions[0].parameters is not None
    assert calls.functions[0].parameters["properties"]["it"] == {"$ref": enforced}


def test_a_result_answers_a_call_before_it() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    made = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    request(messages=[*made, {"role": "tool", "tool_call_id": "c1", "content": "1"}])
    with pytest.raises(ApiError) as refused:
        request(messages=[*made, {"role": "tool", "tool_call_id": "c2", "content": "1"}])
    assert refused.value.param == "messages[2].tool_call_id"
