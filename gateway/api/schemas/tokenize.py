"""`POST /v1/tokenize` and `POST /v1/detokenize`: what the model sees of a text, and back."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from engine.text import ChatOptions
from gateway.api.schemas.common import invalid
from gateway.api.schemas.messages import Message, check_tool_results
from gateway.api.schemas.template import chat_options
from gateway.api.schemas.tools import FunctionTool, calling

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


class TokenizeRequest(Struct, kw_only=True):
    """A text, or a conversation through the model's chat template."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    """True if absent."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "Send either 'prompt' or 'messages'.")
        if self.tools and self.messages is None:
            raise invalid("tools", "'tools' go with 'messages'.")
        check_tool_results(self.messages or [])
        self.options()
        calling(self.tools, None, True)

    def options(self) -> ChatOptions:
        """How the messages become a prompt."""
        return chat_options(
            self.messages or (), self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs
        )


class DetokenizeRequest(Struct, kw_only=True):
    model: str
    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1_000_000)]

    def check(self) -> None:
        """Ids are checked against the model's vocabulary where that is known."""
