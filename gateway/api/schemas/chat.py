"""`POST /v1/chat/completions`: every documented field, honoured or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec import json as _json

from gateway.api.schemas.common import GenerationRequest, Positive, invalid, unsupported
from gateway.api.schemas.messages import Message

__all__ = ["ChatRequest", "FunctionTool", "ResponseFormat"]


class Function(Struct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: Function


class NamedFunction(Struct):
    name: str


class NamedChoice(Struct):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Struct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    store: bool | None = None
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
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
        self._check_metadata()
        self._check_tools()
        if self.structured_outputs is not None and not isinstance(self.response_format, TextFormat | None):
            raise invalid("structured_outputs", "Send either 'structured_outputs' or 'response_format'.")
        self._check_unsupported()

    def _check_metadata(self) -> None:
        if self.metadata is not None and (len(self.metadata) > 16 or any(len(k) > 64 for k in self.metadata)):
            raise invalid("metadata", "'metadata' holds at most 16 keys of at most 64 characters.")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise invalid("tools", "Two tools have the same name.")
        choice = self.tool_choice
        if not names and choice is not None and choice not in ("none", "auto"):
            raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise invalid("tool_choice", f"No tool is named '{choice.function.name[:64]}'.")

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

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def grammar(self) -> str:
        """The constraint on the answer's text as `Sampling.grammar`, or empty."""
        if self.structured_outputs is not None:
            return self.structured_outputs.encode()
        match self.response_format:
            case JsonObjectFormat():
                return _json.encode({"kind": "json_object"}).decode()
            case JsonSchemaFormat(json_schema=wanted) if wanted.schema is not None:
                return _json.encode({"kind": "json_schema", "schema": wanted.schema}).decode()
            case JsonSchemaFormat():
                return _json.encode({"kind": "json_object"}).decode()
        return ""
