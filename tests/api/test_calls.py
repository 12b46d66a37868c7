"""Tool calls read from text: the same whatever the text is cut into, and nothing lost when there were none."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.messages import ModelCard
from gateway.api.calls import CallReader
from gateway.api.schemas.chat import ChatRequest
from gateway.api.tools import plan_tools
from gateway.errors import ApiError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\{}[]<>é ', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"}', max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.text("fgh_", min_size=1, max_size=6), st.dictionaries(st.text("ab"), JSON)), max_size=3)


def read(text: str, forced: bool, cuts: list[int]) -> tuple[str, list[dict[str, Any]], CallReader]:
    reader, shown, deltas = CallReader(forced), "", []
    edges = [0, *sorted(cuts), len(text)]
    for a, b in pairwise(edges):
        piece, calls = reader.push(text[a:b])
        shown += piece
        deltas += calls
    return shown + reader.flush(), deltas, reader


def joined(deltas: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if "id" in delta:
            calls[delta["index"]] = [delta["function"]["name"], ""]
        calls[delta["index"]][1] += delta["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def written(calls: list[tuple[str, Any]], indent: int | None) -> list[str]:
    return [json.dumps({"name": n, "arguments": a}, ensure_ascii=False, indent=indent) for n, a in calls]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(calls=CALLS, indent=st.none() | st.just(2), array=st.booleans(), data=st.data())
def test_forced_calls(calls: list[tuple[str, Any]], indent: int | None, array: bool, data: st.DataObject) -> None:
    one_by_one = written(calls, indent)
    text = f"[{', '.join(one_by_one)}]" if array else "".join(one_by_one[:1])
    expected = calls if array else calls[:1]
    shown, deltas, reader = read(text, True, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert joined(deltas) == expected
    assert [(c.name, json.loads("".join(c.arguments))) for c in reader.calls] == expected
    assert shown == "" or not expected


@settings(derandomize=True, deadline=None, max_examples=200)
@given(calls=CALLS, before=st.text("ab <t{o\n", max_size=12), data=st.data())
def test_marked_calls_after_text(calls: list[tuple[str, Any]], before: str, data: st.DataObject) -> None:
    text = before + "".join(f"<tool_call>\n{c}\n</tool_call>\n" for c in written(calls, None))
    shown, deltas, _ = read(text, False, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert shown == before and joined(deltas) == calls


@settings(derandomize=True, deadline=None, max_examples=200)
@given(text=st.text('<tool_cal>/{}"na me:,\n', max_size=40), data=st.data())
def test_text_that_is_no_call_is_shown_whole(text: str, data: st.DataObject) -> None:
    shown, deltas, reader = read(text, False, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert deltas or (shown == text and not reader.calls)


def test_the_mark_is_never_shown_in_part() -> None:
    reader = CallReader(False)
    pieces = [reader.push(c)[0] for c in 'so <tool_call>{"name": "f", "arguments": {}}</tool_call>']
    assert "".join(pieces) == "so "


def request(**fields: Any) -> ChatRequest:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "g"}},
    ]
    messages = [{"role": "user", "content": "x"}]
    body = msgspec.convert({"model": "m", "messages": messages, "tools": tools, **fields}, ChatRequest)
    body.check()
    return body


def card(*capabilities: str) -> ModelCard:
    return ModelCard("m", "h", 1, 100, 100, (0,), None, False, "", "", capabilities, "m", 0)


def test_the_plan_follows_tool_choice() -> None:
    able = card("chat", "tools", "grammar")

    def plan(**fields: Any) -> Any:
        return plan_tools(request(**fields), able)

    assert plan(tool_choice="none") is None
    assert plan().grammar == plan(tool_choice="auto").grammar == ""
    assert [t["function"]["name"] for t in plan().tools] == ["f", "g"]
    either = json.loads(plan(tool_choice="required").grammar)["schema"]
    assert [s["properties"]["name"]["const"] for s in either["anyOf"]] == ["f", "g"]
    many = json.loads(plan(tool_choice="required", parallel_tool_calls=True).grammar)["schema"]
    assert many["type"] == "array" and many["minItems"] == 1
    named = json.loads(plan(tool_choice={"type": "function", "function": {"name": "g"}}).grammar)["schema"]
    assert named["properties"]["name"] == {"const": "g"}


@pytest.mark.parametrize(
    ("capabilities", "fields", "param"),
    [
        ((), {}, "tools"),
        (("tools",), {"tool_choice": "required"}, "tool_choice"),
        (("tools", "grammar"), {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_can_not_be_honoured_is_named(capabilities: tuple[str, ...], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        plan_tools(request(**fields), card(*capabilities))
    assert refused.value.param == param
