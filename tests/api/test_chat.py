"""Chat completions through HTTP: shapes, streams, and the fields that change them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness import POOL, events

ASK: dict[str, Any] = {"model": POOL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/chat/completions", json={**ASK, **fields})


def test_the_whole_answer_has_every_documented_field(client: httpx.Client) -> None:
    response = ask(client)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-") and body["id"].endswith(response.headers["x-request-id"])
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None and choice["index"] == 0
    assert choice["message"]["role"] == "assistant" and choice["message"]["refusal"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == 12 == len(choice["message"]["content"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


@pytest.mark.parametrize("fields", [{"seed": 7}, {"seed": -7}, {"seed": 7, "n": 3}, {"seed": 1, "stop": ["e "]}])
def test_the_stream_joined_is_the_whole_answer(client: httpx.Client, fields: dict[str, Any]) -> None:
    whole = ask(client, max_tokens=40, **fields).json()
    chunks = events(ask(client, max_tokens=40, stream=True, **fields).text)
    joined: dict[int, str] = {}
    ended: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content")
            assert choice["index"] not in ended, "text after the end"
            assert ("role" in choice["delta"]) == (choice["index"] not in joined)
            joined[choice["index"]] = joined.get(choice["index"], "") + (text or "")
            if choice["finish_reason"]:
                ended[choice["index"]] = choice["finish_reason"]
    assert [joined[i] for i in sorted(joined)] == [c["message"]["content"] for c in whole["choices"]]
    assert [ended[i] for i in sorted(ended)] == [c["finish_reason"] for c in whole["choices"]]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)


def test_usage_comes_once_in_a_last_chunk_without_choices(client: httpx.Client) -> None:
    response = ask(client, stream=True, stream_options={"include_usage": True}, n=2)
    chunks = events(response.text)
    assert response.text.endswith("data: [DONE]\n\n")
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 24


def test_a_stream_tells_proxies_not_to_hold_it(client: httpx.Client) -> None:
    headers = ask(client, stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache, no-transform" and headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers


def test_a_slow_first_token_gets_headers_and_comments(stack: Any, client: httpx.Client) -> None:
    stack.engine("decode_tps=50,prefill_tps=20", pool="slow")
    body = {**ASK, "model": "slow", "stream": True, "messages": [{"role": "user", "content": "x" * 10}]}
    with client.stream("POST", "/chat/completions", json=body) as response:
        assert response.status_code == 200
        text = "".join(response.iter_text())
    assert text.startswith(": keep-alive\n\n")
    assert len(events(text)) > 2


def test_logprobs_are_lists_of_tokens_with_alternatives(client: httpx.Client) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2, seed=3).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert len(content) == 12 and all(len(t["top_logprobs"]) == 2 for t in content)
    assert "".join(t["token"] for t in content) == whole["message"]["content"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    chunks = events(ask(client, logprobs=True, top_logprobs=2, seed=3, stream=True).text)
    streamed = [t for c in chunks for x in c["choices"] if x["logprobs"] for t in x["logprobs"]["content"]]
    assert streamed == content


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_every_role_is_taken(client: httpx.Client, role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert ask(client, messages=messages).status_code == 200


def test_tool_results_are_taken(client: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert ask(client, messages=messages).status_code == 200


def test_null_means_absent(client: httpx.Client) -> None:
    nothing = dict.fromkeys(
        (
            "temperature",
            "top_p",
            "n",
            "stop",
            "seed",
            "logit_bias",
            "user",
            "stream",
            "stream_options",
            "tools",
            "logprobs",
        )
    )
    assert ask(client, **nothing).status_code == 200


def test_a_huge_token_limit_is_a_cap(client: httpx.Client) -> None:
    assert ask(client, max_tokens=10**9, stop=[" "], seed=1).json()["choices"][0]["finish_reason"] == "stop"


def test_the_clients_own_request_id_does_not_become_ours(client: httpx.Client) -> None:
    response = client.post("/chat/completions", json=ASK, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] != "mine"
