"""Tools and the choice among them: shapes, and what they come to for one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.api.schemas.common import FunctionName, invalid
from gateway.api.schemas.json_schema import checked_schema

__all__ = ["Calling", "FunctionTool", "ToolChoice", "calling"]

MAX_TOOLS_BYTES: Final = 256 * 1024
MAX_DESCRIPTION: Final = 8192
_NOTHING: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a function that names none."""


class Function(Struct):
    name: FunctionName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: Function


class NamedFunction(Struct):
    name: str


class NamedChoice(Struct, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTool(Struct):
    type: Literal["function"]
    function: NamedFunction


class Allowed(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=128)]


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


@dataclass(frozen=True, slots=True)
class Calling:
    """How one answer may call tools. `functions`: those it may call, with checked parameters."""

    shown: list[dict[str, Any]]
    """All tools, as a chat template takes them."""
    functions: tuple[Function, ...]
    forced: bool
    """The answer is nothing but calls."""
    many: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.functions)


def calling(tools: Sequence[FunctionTool] | None, choice: ToolChoice | None, parallel: bool) -> Calling | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` come to; None: no calls. Raises `ApiError`."""
    functions = _checked(tools or ())
    if not functions:
        if choice is not None and choice not in ("none", "auto"):
            raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
        return None
    wanted, forced = _wanted(choice, [f.name for f in functions])
    if choice == "none":
        return None
    return Calling(
        shown=msgspec.to_builtins(list(tools or ())),
        functions=tuple(f for f in functions if f.name in wanted),
        forced=forced,
        many=parallel and not isinstance(choice, NamedChoice),
    )


def _wanted(choice: ToolChoice | None, names: list[str]) -> tuple[list[str], bool]:
    """The names that may be called, and whether one must be."""
    match choice:
        case NamedChoice(function=NamedFunction(name=name)):
            wanted, forced = [name], True
        case AllowedChoice(allowed_tools=allowed):
            wanted, forced = [tool.function.name for tool in allowed.tools], allowed.mode == "required"
        case _:
            return names, choice == "required"
    for name in wanted:
        if name not in names:
            raise invalid("tool_choice", f"No tool is named '{name[:64]}'.")
    return wanted, forced


def _checked(tools: Sequence[FunctionTool]) -> list[Function]:
    functions = [tool.function for tool in tools]
    if len({f.name for f in functions}) < len(functions):
        raise invalid("tools", "Two tools have the same name.")
    if len(msgspec.json.encode(functions)) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"The tools take more than {MAX_TOOLS_BYTES // 1024} KiB together.")
    return [_with_parameters(f, f"tools[{i}].function.parameters") for i, f in enumerate(functions)]


def _with_parameters(function: Function, where: str) -> Function:
    given = function.parameters
    if not given:
        return msgspec.structs.replace(function, parameters=_NOTHING)
    if given.get("type", "object") != "object":
        raise invalid(where, f"The parameters of '{function.name}' are a schema of type 'object'.")
    return msgspec.structs.replace(function, parameters={"type": "object", **checked_schema(given, where)})
