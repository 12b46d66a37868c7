"""How a conversation becomes a prompt: template variables, the generation prompt, a last message to go on with."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.test_chat import ASK, ask
from tests.api.test_errors import called, check
from tests.harness import POOL, events

OPENED = [*ASK["messages"], {"role": "assistant", "content": "Oh "}]
GO_ON = {"messages": OPENED, "continue_final_message": True}


def prompt(client: httpx.Client, **fields: Any) -> str:
    """What the model sees. That it is what a chat request is answered from shows in its count."""
    asked = {"messages": ASK["messages"], **fields}
    tokens = client.post("/tokenize", json={"model": POOL, **asked}).json()["tokens"]
    assert ask(client, **asked).json()["usage"]["prompt_tokens"] == len(tokens)
    text: str = client.post("/detokenize", json={"model": POOL, "tokens": tokens}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "assistant\n"),
        ({"chat_template_kwargs": {}}, "assistant\n"),
        ({"chat_template_kwargs": None}, "assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "assistant\n<think>\n"),
        ({"chat_template_kwargs": {"enable_thinking": False, "unknown": [{"a": None}]}}, "assistant\n"),
        ({"add_generation_prompt": False}, "Hi<|im_end|>\n"),
        ({"messages": OPENED}, "Oh <|im_end|>\n<|im_start|>assistant\n"),
        (GO_ON, "<|im_start|>assistant\nOh "),
        (GO_ON | {"add_generation_prompt": False}, "<|im_start|>assistant\nOh "),
        (GO_ON | {"continue_final_message": False}, "Oh <|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_the_prompt_ends_as_asked(client: httpx.Client, fields: dict[str, Any], end: str) -> None:
    assert prompt(client, **fields).endswith(end)


def test_an_answer_that_goes_on_holds_only_what_is_new(client: httpx.Client) -> None:
    whole = ask(client, seed=3, **GO_ON).json()["choices"][0]["message"]["content"]
    chunks = events(ask(client, seed=3, stream=True, **GO_ON).text)
    assert not whole.startswith("Oh ")
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == whole


@pytest.mark.parametrize("path", ["/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs.raise_exception"),
        ({"chat_template_kwargs": {"range": 1}}, "chat_template_kwargs.range"),
        ({"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs.a-b"),
        ({"chat_template_kwargs": {"a": "x" * 65_536}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        (GO_ON | {"add_generation_prompt": True}, "add_generation_prompt"),
        (GO_ON | {"messages": [*ASK["messages"], called()]}, "continue_final_message"),
    ],
)
def test_what_can_not_be_set_is_named(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    response = client.post(path, json={"model": POOL, "messages": ASK["messages"], **fields})
    assert check(response, 400)["param"] == param


def test_a_template_or_documents_of_the_request_are_refused(client: httpx.Client) -> None:
    for name, value in (("chat_template", "{{ messages }}"), ("documents", [{"text": "x"}])):
        assert check(ask(client, **{name: value}), 400, "unsupported_parameter")["param"] == name
