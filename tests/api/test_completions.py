"""Text completions: the four forms of a prompt, echo, and log-probabilities in the older shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness import POOL, events


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> httpx.Response:
    return client.post("/completions", json={"model": POOL, "prompt": prompt, "max_tokens": 6, **fields})


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("abc", 1), (["abc", "de"], 2), ([97, 98], 1), ([[97, 98], [99]], 2), ("", 1), ([""], 1)],
)
def test_every_form_of_prompt(client: httpx.Client, prompt: Any, choices: int) -> None:
    body = complete(client, prompt).json()
    assert body["object"] == "text_completion"
    assert [c["index"] for c in body["choices"]] == list(range(choices))
    assert body["usage"]["completion_tokens"] == 6 * choices


def test_prompt_forms_agree(client: httpx.Client) -> None:
    by_text, by_ids = complete(client, "abc", seed=1).json(), complete(client, [97, 98, 99], seed=1).json()
    assert by_text["choices"] == by_ids["choices"] and by_text["usage"]["prompt_tokens"] == 3


def test_choices_are_ordered_by_prompt_then_number(client: httpx.Client) -> None:
    body = complete(client, ["ab", "cd"], n=2, echo=True).json()
    assert [c["text"][:2] for c in body["choices"]] == ["ab", "ab", "cd", "cd"]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo_comes_first_streamed_or_whole(client: httpx.Client, prompt: Any) -> None:
    whole = complete(client, prompt, echo=True, seed=5).json()["choices"][0]["text"]
    chunks = events(complete(client, prompt, echo=True, seed=5, stream=True).text)
    assert whole.startswith("ab") and len(whole) == 8
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole


def test_logprobs_have_the_older_shape(client: httpx.Client) -> None:
    choice = complete(client, "ab", logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(6)) and len(logprobs["token_logprobs"]) == 6
    chunks = events(complete(client, "ab", logprobs=2, stream=True).text)
    offsets = [o for c in chunks for x in c["choices"] if x["logprobs"] for o in x["logprobs"]["text_offset"]]
    assert offsets == list(range(6))


def test_best_of_shows_fewer_answers_than_it_counts(client: httpx.Client) -> None:
    """Which they are is asked of the real model: to the simulated one all tokens are as likely."""
    made = complete(client, ["ab", "cd"], n=4, seed=5).json()
    best = complete(client, ["ab", "cd"], n=2, best_of=4, seed=5, echo=True).json()
    assert [c["text"][:2] for c in best["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [c["index"] for c in best["choices"]] == [0, 1, 2, 3] and all(c["logprobs"] is None for c in best["choices"])
    assert best["usage"] == made["usage"]
    same = complete(client, "ab", n=2, best_of=2, seed=5).json()["choices"]
    assert same == complete(client, "ab", n=2, seed=5).json()["choices"]


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([[]], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([10**9], {}, "prompt"),
        (["a", 1], {}, "prompt"),
        ([[1], "a"], {}, "prompt"),
        ([1.5], {}, "prompt"),
        (["a", None], {}, "prompt"),
        (None, {}, "prompt"),
        ({"a": 1}, {}, "prompt"),
        ("a", {"suffix": "b"}, "suffix"),
        ("a", {"best_of": 3, "stream": True}, "best_of"),
        ("a", {"best_of": 21}, "best_of"),
        (["a"] * 7, {"best_of": 20}, "prompt"),
        ("a", {"best_of": 1, "n": 2}, "best_of"),
        ("a", {"logprobs": 6}, "logprobs"),
        ("a", {"max_tokens": 0}, "max_tokens"),
        ("a", {"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ("a", {"response_format": {"type": "json_object"}}, "response_format"),
        ("a", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (["a"] * 129, {}, "prompt"),
        ("a" * 40_000, {}, "prompt"),
        ("a" * 3_000_000, {}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, prompt: Any, fields: dict[str, Any], param: str) -> None:
    response = complete(client, prompt, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
