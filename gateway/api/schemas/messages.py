"""Chat messages: one struct per role, content as text or as parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.api.schemas.common import FunctionName
from gateway.errors import ApiError

__all__ = ["Message", "check_tool_results", "render"]

Name = Annotated[str, Meta(pattern=r"^[^\s<|\\/>]{1,64}$(?!\n)")]
"""Of who speaks. What OpenAI takes: nothing that a chat template could mistake for a mark of its own."""


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    refusal: str


class ImageUrl(Struct):
    url: str
    detail: str | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class AudioPart(Struct, tag_field="type", tag="input_audio"):
    input_audio: dict[str, Any]


class FilePart(Struct, tag_field="type", tag="file"):
    file: dict[str, Any]


UserPart = TextPart | ImagePart | AudioPart | FilePart
AssistantPart = TextPart | RefusalPart


class SystemMessage(Struct, tag_field="role", tag="system"):
    content: str | list[TextPart]
    name: Name | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer"):
    content: str | list[TextPart]
    name: Name | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    content: str | list[UserPart]
    name: Name | None = None


class CalledFunction(Struct):
    name: FunctionName
    arguments: str


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    content: str | list[AssistantPart] | None = None
    name: Name | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    audio: dict[str, Any] | None = None


class ToolMessage(Struct, tag_field="role", tag="tool"):
    content: str | list[TextPart]
    tool_call_id: str


class FunctionMessage(Struct, tag_field="role", tag="function"):
    content: str | None
    name: FunctionName


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


def check_tool_results(messages: list[Message]) -> None:
    """A result answers a call made before it."""
    made: set[str] = set()
    for i, message in enumerate(messages):
        match message:
            case AssistantMessage(tool_calls=list() as calls):
                made.update(call.id for call in calls)
            case ToolMessage(tool_call_id=call) if call not in made:
                raise ApiError(
                    "invalid_value",
                    f"'messages[{i}]' answers the call '{call[:64]}', which no assistant message before it makes.",
                    param=f"messages[{i}].tool_call_id",
                )


def render(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template expects them: text content, no absent fields."""
    return [_render(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _render(message: Message, where: str) -> dict[str, Any]:
    content = _text(message.content, f"{where}.content")
    match message:
        case SystemMessage() | DeveloperMessage():
            # Templates know `system` only; `developer` is its newer name.
            rendered: dict[str, Any] = {"role": "system", "content": content}
        case UserMessage():
            rendered = {"role": "user", "content": content}
        case AssistantMessage():
            rendered = _assistant(message, content, where)
        case ToolMessage():
            rendered = {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
        case FunctionMessage():
            rendered = {"role": "tool", "content": content, "name": message.name}
    name = getattr(message, "name", None)
    if name is not None:
        rendered["name"] = name
    return rendered


def _assistant(message: AssistantMessage, content: str, where: str) -> dict[str, Any]:
    if message.audio is not None:
        raise ApiError("unsupported_value", "Audio is not supported.", param=f"{where}.audio")
    calls = list(message.tool_calls or [])
    if message.function_call is not None:
        calls.append(ToolCall(id="call_0", function=message.function_call))
    if message.content is None and not calls and message.refusal is None:
        raise ApiError("invalid_value", f"'{where}' has neither content nor tool calls.", param=f"{where}.content")
    rendered: dict[str, Any] = {"role": "assistant", "content": content or message.refusal or ""}
    if calls:
        rendered["tool_calls"] = msgspec.to_builtins(calls)
    return rendered


def _text(content: str | list[Any] | None, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not content:
        raise ApiError("invalid_value", f"'{where}' is an empty list of parts.", param=where)
    texts = []
    for i, part in enumerate(content):
        match part:
            case TextPart():
                texts.append(part.text)
            case RefusalPart():
                texts.append(part.refusal)
            case _:
                kind = part.__struct_config__.tag
                raise ApiError(
                    "unsupported_value", f"This model takes text only, not '{kind}'.", param=f"{where}[{i}].type"
                )
    return "".join(texts)
