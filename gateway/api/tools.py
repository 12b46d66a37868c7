"""How a request's tools are honoured: shown to the model, and forced by a constraint where the client says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from engine.protocol.messages import ModelCard
from gateway.api.schemas.chat import ChatRequest, FunctionTool, NamedChoice
from gateway.api.schemas.common import unsupported

__all__ = ["ToolPlan", "plan_tools"]

_MAX_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`tools` goes to the chat template, `grammar` forces a call (empty: the model decides)."""

    tools: list[dict[str, Any]]
    grammar: str


def plan_tools(body: ChatRequest, card: ModelCard) -> ToolPlan | None:
    """None when the request has no tools, or forbids their use."""
    if not body.tools or body.tool_choice == "none":
        return None
    if "tools" not in card.capabilities:
        raise unsupported("tools", "this model can't call tools.")
    if body.response_format is not None and body.grammar():
        raise unsupported("response_format", "together with tools it can't be honoured; set 'tool_choice' to 'none'.")
    grammar = _forced(body, body.tools)
    if grammar and "grammar" not in card.capabilities:
        raise unsupported("tool_choice", "this model's engine can't be made to call a tool; use 'auto'.")
    return ToolPlan(msgspec.to_builtins(body.tools), grammar)


def _forced(body: ChatRequest, tools: list[FunctionTool]) -> str:
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return ""
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    shapes = [_call(tool) for tool in tools]
    shape: dict[str, Any] = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    if body.parallel_tool_calls and not isinstance(choice, NamedChoice):
        shape = {"type": "array", "items": shape, "minItems": 1, "maxItems": _MAX_PARALLEL}
    return orjson.dumps({"kind": "json_schema", "schema": shape}).decode()


def _call(tool: FunctionTool) -> dict[str, Any]:
    function = tool.function
    return {
        "type": "object",
        # In this order: the name is known before the arguments begin to stream.
        "properties": {"name": {"const": function.name}, "arguments": _arguments(function.parameters)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A function without parameters takes an empty object; arguments are always an object."""
    if not parameters:
        return {"type": "object", "additionalProperties": False}
    return parameters if "type" in parameters else {"type": "object", **parameters}
