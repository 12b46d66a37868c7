"""The forms in which a client may constrain its answer, and what they come to on the wire."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from engine.text.grammar import JSON_OPTIONS
from engine.text.tools import CALL_CLOSE, CALL_OPEN
from gateway.api.schemas.common import FunctionName, StructuredOutputs, invalid
from gateway.api.schemas.json_schema import checked_schema
from gateway.api.schemas.tools import Calling, Function

__all__ = ["ResponseFormat", "Wanted", "wanted_by_extension", "wanted_by_format", "with_calls"]

MAX_CALLS: Final = 16
"""Calls in one answer that a grammar forces."""


class JsonSchema(Struct):
    name: FunctionName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None
    """An extension that other servers have: the same as `json_schema`, without a name."""


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class Wanted(Struct, frozen=True):
    """A constraint as `Sampling.grammar` has it, and the request field that it came from, for refusals."""

    constraint: dict[str, Any]
    param: str

    def text(self) -> str:
        return msgspec.json.encode(self.constraint).decode()


def wanted_by_format(format: ResponseFormat | None) -> Wanted | None:
    """What `response_format` asks for."""
    match format:
        case JsonObjectFormat(schema=None):
            return Wanted({"kind": "json_object"}, "response_format")
        case JsonObjectFormat(schema=dict() as schema):
            return _schema(schema, "response_format.schema")
        case JsonSchemaFormat(json_schema=JsonSchema(schema=None)):
            return Wanted({"kind": "json_object"}, "response_format")
        case JsonSchemaFormat(json_schema=JsonSchema(schema=dict() as schema)):
            return _schema(schema, "response_format.json_schema.schema")
    return None


def wanted_by_extension(wish: StructuredOutputs | None) -> Wanted | None:
    """What `structured_outputs` asks for."""
    match wish:
        case StructuredOutputs(json=dict() as schema):
            return _schema(schema, "structured_outputs.json")
        case StructuredOutputs(json=bool() as schema):
            return Wanted({"kind": "json_schema", "schema": schema}, "structured_outputs.json")
        case StructuredOutputs(regex=str() as regex):
            return Wanted({"kind": "regex", "regex": regex}, "structured_outputs.regex")
        case StructuredOutputs(choice=list() as choice):
            return Wanted({"kind": "choice", "choice": choice}, "structured_outputs.choice")
        case StructuredOutputs(grammar=str() as grammar):
            return Wanted({"kind": "lark", "lark": grammar}, "structured_outputs.grammar")
    return None


def with_calls(content: Wanted | None, calls: Calling | None) -> Wanted | None:
    """The constraint on the whole answer when it may also call tools."""
    if calls is None:
        return content
    if calls.forced:
        return Wanted(_lark(calls, "start: calls"), "tools")
    if content is not None:
        if content.constraint["kind"] not in ("json_object", "json_schema"):
            raise invalid(content.param, "It can't be combined with tools that the model may call.")
        schema = content.constraint.get("schema", {"type": "object"})
        return Wanted(_lark(calls, f"start: calls | content\ncontent: {_json(schema)}"), content.param)
    if any(f.strict for f in calls.functions):
        # Free text until a call begins, which then has to be right.
        text = f"start: opened* TEXT\nTEXT: /(.|\\n)*/\nopening[lazy]: TEXT {_quoted(CALL_OPEN)}\nopened: opening body"
        return Wanted(_lark(calls, text), "tools")
    return None


def _lark(calls: Calling, start: str) -> dict[str, Any]:
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if calls.many else ""
    names = " | ".join(f"f{i}" for i in range(len(calls.functions)))
    lines = [
        start,
        f"calls: call{more}",
        f"call: {_quoted(CALL_OPEN)} body",
        f"body: {_quoted(chr(10))} ({names}) {_quoted(chr(10) + CALL_CLOSE)}",
        *(f"f{i}: {_call(function)}" for i, function in enumerate(calls.functions)),
    ]
    return {"kind": "lark", "lark": "\n".join(lines) + "\n"}


def _call(function: Function) -> str:
    opening = f'{{"name": "{function.name}", "arguments": '
    return f'{_quoted(opening)} {_json(function.parameters or {})} "}}"'


def _json(schema: dict[str, Any]) -> str:
    return "%json " + msgspec.json.encode(schema | {"x-guidance": JSON_OPTIONS}).decode()


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _schema(schema: dict[str, Any], param: str) -> Wanted:
    return Wanted({"kind": "json_schema", "schema": checked_schema(schema, param)}, param)
