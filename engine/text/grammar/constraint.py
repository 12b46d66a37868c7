"""A constraint as it travels in `Sampling.grammar`, and as the grammar library takes it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

__all__ = [
    "COMMON",
    "JSON_OPTIONS",
    "Choice",
    "Constraint",
    "ConstraintError",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Regex",
    "parse",
]

COMMON: Final = '{"kind":"json_object"}'
"""What most requests with a constraint ask for. Compiled before the first of them, so that it need not wait."""
JSON_OPTIONS: Final[dict[str, Any]] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    # Bounded: a model that has lost its way likes to fill the rest of its answer with line feeds.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "coerce_one_of": False,
    "lenient": False,
}
"""How JSON is written. Given as overrides, so that a schema can't change them."""


class ConstraintError(ValueError):
    """The constraint can't be enforced; the message says why, in words for whoever sent it."""


class JsonObject(msgspec.Struct, frozen=True, tag_field="kind", tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, tag_field="kind", tag="json_schema"):
    schema: dict[str, Any] | bool


class Regex(msgspec.Struct, frozen=True, tag_field="kind", tag="regex"):
    """The whole text matches. Rust's syntax, without look-around."""

    regex: str


class Choice(msgspec.Struct, frozen=True, tag_field="kind", tag="choice"):
    """One of these texts."""

    choice: tuple[str, ...]


class Lark(msgspec.Struct, frozen=True, tag_field="kind", tag="lark"):
    """A grammar in llguidance's dialect of Lark, or in GBNF (known by its `::=`)."""

    lark: str


Constraint = JsonObject | JsonSchema | Regex | Choice | Lark
_decoder = msgspec.json.Decoder(Constraint)


def parse(text: str) -> Constraint:
    """From `Sampling.grammar`. Raises `ConstraintError`."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConstraintError(f"not a constraint: {error}") from None


def library_grammar(constraint: Constraint) -> str:
    """What `LLMatcher` takes. Most faults show only when that is compiled. Raises `ConstraintError`."""
    match constraint:
        case JsonObject():
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        case JsonSchema(schema):
            given = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
            return LLMatcher.grammar_from_json_schema(given, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        case Regex(regex):
            # \d is a digit from 0 to 9, as in JSON Schema: nobody who writes it means the other 700.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, use_ascii='d')}/")
        case Choice(choice):
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, choice)))
        case Lark(lark):
            return LLMatcher.grammar_from_lark(_lark(lark))


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the converter raises whatever its parser meets
        raise ConstraintError(f"not a GBNF grammar: {error}") from None
