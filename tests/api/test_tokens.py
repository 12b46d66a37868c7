"""Tokenise and back, and the headers that tell what a request cost."""

from __future__ import annotations

import httpx
import pytest

from tests.api.test_chat import ASK, ask
from tests.api.test_errors import check
from tests.harness import POOL

TOOL = {"type": "function", "function": {"name": "f"}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "thing"}}}}}


@pytest.mark.parametrize("text", ["", "Hello", "héllo 🌊", "<|im_end|>"])
def test_there_and_back(client: httpx.Client, text: str) -> None:
    body = client.post("/tokenize", json={"model": POOL, "prompt": text, "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert client.post("/detokenize", json={"model": POOL, "tokens": body["tokens"]}).json() == {"prompt": text}


def test_a_conversation_is_counted_as_it_is_billed(client: httpx.Client) -> None:
    asked = {"model": POOL, "messages": ASK["messages"], "add_generation_prompt": None}
    count = client.post("/tokenize", json=asked).json()["count"]
    assert count == ask(client).json()["usage"]["prompt_tokens"]


def test_what_is_wrong_is_named(client: httpx.Client) -> None:
    for body, param in [
        ({"prompt": "a", "messages": ASK["messages"]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": ASK["messages"], "tools": [TOOL, TOOL]}, "tools"),
        ({"messages": ASK["messages"], "tools": [BAD_TOOL]}, "tools[0].function.parameters.properties.a.type"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
    ]:
        assert check(client.post("/tokenize", json={"model": POOL, **body}), 400)["param"] == param
    for tokens in ([-1], [10**7], ["a"], "a"):
        assert check(client.post("/detokenize", json={"model": POOL, "tokens": tokens}), 400)["param"] == "tokens"
    check(client.post("/tokenize", json={"model": "none", "prompt": "a"}), 404, "model_not_found")


def test_a_request_tells_its_times_and_its_cost(client: httpx.Client) -> None:
    timing = ask(client).headers["server-timing"]
    for name in ("queue;dur=", "prefill;dur=", "decode;dur=", "cached;desc=", "cost;desc="):
        assert name in timing
    streamed = ask(client, stream=True).headers["server-timing"]
    assert "queue;dur=" in streamed and "cost" not in streamed
