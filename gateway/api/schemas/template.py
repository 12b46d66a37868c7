"""How a conversation becomes a prompt: the fields of vLLM and llama.cpp for it, as the chat template takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engine.text.chat import RESERVED_VARIABLES, ChatOptions
from gateway.api.schemas.common import invalid
from gateway.api.schemas.messages import AssistantMessage, Message

__all__ = ["chat_options"]

MAX_VARIABLES: Final = 64
MAX_BYTES: Final = 64 * 1024
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESERVED: Final = RESERVED_VARIABLES | {"chat_template", "tokenize", "continue_final_message"}
"""The last are arguments of the function that renders templates in `transformers`, whose variables these are."""


def chat_options(
    messages: Sequence[Message], opens: bool | None, continues: bool | None, variables: dict[str, Any] | None
) -> ChatOptions:
    """`add_generation_prompt` (true unless the last message is continued), `continue_final_message` and
    `chat_template_kwargs`, checked. Raises `ApiError`."""
    if continues:
        if opens:
            why = "'add_generation_prompt' and 'continue_final_message' can't both be true."
            raise invalid("add_generation_prompt", why)
        last = messages[-1] if messages else None
        if not isinstance(last, AssistantMessage) or last.tool_calls or last.function_call:
            why = "'continue_final_message' needs a last message of the assistant with text and no calls."
            raise invalid("continue_final_message", why)
    _check_variables(variables or {})
    return ChatOptions(opens is not False and not continues, bool(continues), variables or {})


def _check_variables(variables: dict[str, Any]) -> None:
    for name in variables:
        where = f"chat_template_kwargs.{name[:64]}"
        if name in _RESERVED:
            raise invalid(where, f"'{name}' is no variable that 'chat_template_kwargs' can set.")
        if not _NAME.fullmatch(name):
            raise invalid(where, "The names in 'chat_template_kwargs' are letters, digits and underscores, at most 64.")
    if len(variables) > MAX_VARIABLES or len(msgspec.json.encode(variables)) > MAX_BYTES:
        message = f"'chat_template_kwargs' holds at most {MAX_VARIABLES} names and {MAX_BYTES // 1024} KiB."
        raise invalid("chat_template_kwargs", message)
