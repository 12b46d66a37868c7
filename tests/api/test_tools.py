"""Tool calls over HTTP, from an engine whose text is known to the byte: a token is a byte, so every cut is met."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.api.test_chat import ASK
from tests.harness import Gateway, Stack, events

ARGUMENTS = {"city": 'Köln "am" Rhein', "days": [1, {"n": 2}]}
CALL = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "ping")]


@pytest.fixture(scope="module")
def ask(gateway: Gateway, stack: Stack) -> Any:
    """One pool per text."""
    with gateway.client() as client:
        pools: dict[str, str] = {}

        def send(text: str, **fields: Any) -> httpx.Response:
            if text not in pools:
                pools[text] = f"says-{len(pools)}"
                stack.engine(f"tools=1,decode_tps=0,prefill_tps=0,text={quote(text)}", pool=pools[text])
            body = {**ASK, "model": pools[text], "tools": TOOLS, "max_tokens": 400, **fields}
            return client.post("/chat/completions", json=body)

        yield send


def test_a_whole_answer_with_two_calls_after_text(ask: Any) -> None:
    choice = ask("Let me see. " + CALL * 2).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see. "
    calls = choice["message"]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["get_weather"] * 2 and len({c["id"] for c in calls}) == 2
    assert all(c["type"] == "function" and json.loads(c["function"]["arguments"]) == ARGUMENTS for c in calls)
    one = ask("Let me see. " + CALL * 2, parallel_tool_calls=False).json()["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1


def test_a_stream_brings_the_name_first_and_joins_to_the_same(ask: Any) -> None:
    response = ask("Let me see. " + CALL * 2, stream=True, logprobs=True, stream_options={"include_usage": True})
    chunks = [c["choices"][0] for c in events(response.text) if c["choices"]]
    deltas = [d for c in chunks for d in c["delta"].get("tool_calls", ())]
    text = "".join(c["delta"].get("content") or "" for c in chunks)
    assert text == "Let me see. " and chunks[-1]["finish_reason"] == "tool_calls"
    for index in (0, 1):
        first, *rest = [d for d in deltas if d["index"] == index]
        assert first["id"].startswith("call_") and first["function"] == {"name": "get_weather", "arguments": ""}
        assert all(set(d) == {"index", "function"} and set(d["function"]) == {"arguments"} for d in rest)
        assert json.loads("".join(d["function"]["arguments"] for d in rest)) == ARGUMENTS
    usage = events(response.text)[-1]["usage"]
    logprobs = [t for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]]
    assert len(logprobs) == usage["completion_tokens"]


def test_only_calls_means_no_content(ask: Any) -> None:
    message = ask(CALL).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    roles = [c["choices"][0]["delta"] for c in events(ask(CALL, stream=True).text) if c["choices"][0]["delta"]]
    assert roles[0]["role"] == "assistant" and roles[0]["content"] is None and "tool_calls" in roles[0]


def test_cut_off_in_a_call_it_ends_by_length(ask: Any) -> None:
    choice = ask(CALL, max_tokens=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(arguments.rstrip("\ufffd"))


def test_other_names_and_no_tools_are_text(ask: Any) -> None:
    unknown = CALL.replace("get_weather", "unknown")
    for text, fields in ((unknown, {}), (CALL, {"tool_choice": "none"}), (CALL, {"tools": None})):
        choice = ask(text, **fields).json()["choices"][0]
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_what_this_engine_can_not_force_is_refused(ask: Any) -> None:
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "response_format": {"type": "json_object"}}, "response_format"),
    ):
        response = ask(CALL, **fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
