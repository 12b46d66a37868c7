"""`POST /v1/chat/completions`: every documented field, honoured or refused by name."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from engine.text import ChatOptions
from gateway.api.schemas.common import (
    GenerationRequest,
    Positive,
    check_lengths,
    check_unconstrained,
    invalid,
    unsupported,
)
from gateway.api.schemas.messages import Message, check_tool_results
from gateway.api.schemas.structured import (
    ResponseFormat,
    TextFormat,
    Wanted,
    wanted_by_extension,
    wanted_by_format,
    with_calls,
)
from gateway.api.schemas.template import chat_options
from gateway.api.schemas.tools import Calling, FunctionTool, ToolChoice, calling

__all__ = ["ChatRequest"]


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    store: bool | None = None
    # Extensions that vLLM and llama.cpp have too: how the conversation becomes a prompt.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    documents: Any = None
    # Documented by OpenAI; those that change the answer in a way that no model here can are refused by name.
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        super().check()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "'max_tokens' and 'max_completion_tokens' disagree; send only the latter.")
        check_lengths(self.min_tokens, self.token_limit)
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
        self._check_metadata()
        check_tool_results(self.messages)
        self.options()
        self._check_constraints()
        self._check_unsupported()

    def _check_metadata(self) -> None:
        if self.metadata is not None and (len(self.metadata) > 16 or any(len(k) > 64 for k in self.metadata)):
            raise invalid("metadata", "'metadata' holds at most 16 keys of at most 64 characters.")

    def _check_constraints(self) -> None:
        if self.structured_outputs is not None and not isinstance(self.response_format, TextFormat | None):
            raise invalid("structured_outputs", "Send either 'structured_outputs' or 'response_format'.")
        if self.constraint(self.calling()) is not None:
            check_unconstrained(self)

    def _check_unsupported(self) -> None:
        if self.modalities is not None and self.modalities != ["text"]:
            raise unsupported("modalities", "models here answer in text.")
        if self.store:
            raise unsupported("store", "completions are not stored.")
        if self.verbosity not in (None, "medium"):
            raise unsupported("verbosity", "models here have no such setting.")
        if self.reasoning_effort not in (None, "none"):
            raise unsupported("reasoning_effort", "models here have no such setting.")
        for name in ("audio", "web_search_options"):
            if getattr(self, name) is not None:
                raise unsupported(name, "models here answer in text and use no tools of the server.")
        for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, name) is not None:
                raise unsupported(name, f"use '{newer}'.")
        if self.chat_template is not None:
            raise unsupported("chat_template", "a model is asked with its own.")
        if self.documents is not None:
            raise unsupported("documents", "where the model's template knows them, use 'chat_template_kwargs'.")

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def options(self) -> ChatOptions:
        """How the messages become a prompt."""
        return chat_options(
            self.messages, self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs
        )

    def calling(self) -> Calling | None:
        """How the answer may call tools."""
        return calling(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    def constraint(self, calls: Calling | None) -> Wanted | None:
        """What the answer is held to."""
        return with_calls(wanted_by_format(self.response_format) or wanted_by_extension(self.structured_outputs), calls)
