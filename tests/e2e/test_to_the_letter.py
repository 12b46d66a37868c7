"""To the letter, on the real model: forced text of split characters, stop strings, log-probabilities, best of many."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.e2e.stack import Stack
from tests.harness import events

TEXT = "naïve café 北京 🦊👩‍👩‍👧 STOP, and on to the end."
"""With the real tokenizer most of its characters beyond ASCII are several tokens."""
BODY = {"model": "smollm2-135m", "prompt": "Say:", "max_tokens": 80, "structured_outputs": {"choice": [TEXT]}}
CHAT = {**BODY, "messages": [{"role": "user", "content": "Say it."}]}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def post(stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {stack.key()}"}
    url = f"{stack.credentials['api_base']}{path}"
    return httpx.post(url, json=body, headers=headers, timeout=120).raise_for_status()


def pieces(response: httpx.Response, choice: int = 0) -> list[str]:
    """The text of each chunk."""
    come = events(response.text)
    assert all("error" not in event for event in come), come[-1]
    chunks = [c for event in come for c in event["choices"] if c["index"] == choice]
    return [c.get("text") or c.get("delta", {}).get("content") or "" for c in chunks]


@pytest.mark.parametrize(("path", "body"), [("/completions", BODY), ("/chat/completions", CHAT)])
def test_split_characters_come_whole(stack: Stack, path: str, body: dict[str, Any]) -> None:
    asked = body | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    response = post(stack, path, asked)
    for choice in (0, 1):
        came = pieces(response, choice)
        assert "".join(came) == TEXT and len([piece for piece in came if piece]) > 5
        assert not any("\ufffd" in piece for piece in came)
    tokens = events(response.text)[-1]["usage"]["completion_tokens"]
    assert tokens > 2 * 20  # more tokens than the text would have if its characters were not split


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (["STOP"], "naïve café 北京 🦊👩‍👩‍👧 "),
        (["京"], "naïve café 北"),
        ([" 🦊"], "naïve café 北京"),
        (["\u200d"], "naïve café 北京 🦊👩"),
        (["é 北京 🦊", "STOP"], "naïve caf"),
        (["STOPPED", "🦊👩x", "end.."], TEXT),
        (["STOP, and off", "the end"], "naïve café 北京 🦊👩‍👩‍👧 STOP, and on to "),
    ],
)
def test_a_stop_string_cuts_the_same_streamed_and_whole(stack: Stack, stop: list[str], left: str) -> None:
    whole = post(stack, "/completions", BODY | {"stop": stop}).json()["choices"][0]
    assert whole["text"] == left and whole["finish_reason"] == "stop"
    assert "".join(pieces(post(stack, "/completions", BODY | {"stop": stop, "stream": True}))) == left


def test_log_probabilities_of_forced_tokens_are_json_and_their_bytes_join_to_the_text(stack: Stack) -> None:
    """What the model would never have said has a very low log-probability, but a number."""
    asked = CHAT | {"logprobs": True, "top_logprobs": 20, "logit_bias": {"504": -100}}
    answer = json.loads(post(stack, "/chat/completions", asked).text, parse_constant=refuse)["choices"][0]
    entries = answer["logprobs"]["content"]
    joined = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert joined == TEXT == answer["message"]["content"]
    for entry in entries:
        assert type(entry["logprob"]) is float and entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 20 and all(type(t["logprob"]) is float for t in entry["top_logprobs"])
    assert min(entry["logprob"] for entry in entries) < -8


def test_the_best_of_many_come_first_by_log_probability_per_token(stack: Stack) -> None:
    asked = {"model": "smollm2-135m", "prompt": ["The sea is", "I went to"], "max_tokens": 12, "seed": 7, "logprobs": 0}
    answer = post(stack, "/completions", asked | {"n": 3, "best_of": 8}).json()
    tokens = [c["logprobs"]["token_logprobs"] for c in answer["choices"]]
    scores = [sum(each) / len(each) for each in tokens]
    assert len(scores) == 6 and len(set(scores)) == 6
    assert scores[:3] == sorted(scores[:3], reverse=True) and scores[3:] == sorted(scores[3:], reverse=True)
    assert answer["usage"]["completion_tokens"] > sum(map(len, tokens))
