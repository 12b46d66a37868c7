"""From bytes to a typed request, or to an error that names the field."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from gateway.errors import ApiError

__all__ = ["MAX_DEPTH", "decode_body"]

MAX_DEPTH = 64
"""Levels of arrays and objects. Real requests need about ten; a deep JSON schema perhaps thirty."""

T = TypeVar("T", bound=msgspec.Struct)
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]+)`(?: - at `\$([^`]*)`)?")
_AT = re.compile(r"^(.*?)(?: - at `(?:key in )?\$([^`]*)`)?$", re.DOTALL)
_IN_LIST = re.compile(r"^(\w+)(?:\[\d+\])+$")
_WRONG_TYPE = re.compile(r"Expected `([a-z |]+)`(?:, got `(\w+)`)?$")
_NOUNS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_UNKNOWN_TAG = re.compile(r"Invalid value '(.*)'$", re.DOTALL)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode and validate. NaN, bad UTF-8, lone surrogates, repeated keys and excessive depth are refused."""
    if not body:
        raise ApiError("invalid_json", "The request body is empty; send a JSON object.")
    _check_depth(body)
    try:
        request = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError("invalid_json", f"We could not parse the JSON body of your request: {error}.") from None
    _check_keys(body)
    return request


@lru_cache(maxsize=32)
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _TOKENS.finditer(body):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ApiError("nested_too_deep", f"The JSON body is nested deeper than {MAX_DEPTH} levels.")
        elif first in b"]}":
            depth -= 1


def _check_keys(body: bytes) -> None:
    """A repeated key means different things to different parsers on the way, so it means nothing here."""
    try:
        _KEYS.decode(body.decode())
    except ValueError as error:  # an integer of thousands of digits in a field that nobody reads
        raise ApiError("invalid_json", f"We could not parse the JSON body of your request: {error}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ApiError(
                    "duplicate_key", f"The key '{key[:64]}' appears twice in one JSON object.", param=key[:64]
                )
            seen.add(key)


_KEYS = json.JSONDecoder(object_pairs_hook=_unique)
"""Made once: that takes as long as it takes to read a short body."""


def _invalid(message: str) -> ApiError:
    """msgspec names the place as a path; OpenAI's `param` is that path."""
    if missing := _MISSING.match(message):
        name, at = missing[1], (missing[2] or "").lstrip(".")
        param = f"{at}.{name}" if at else name
        return ApiError("missing_required_parameter", f"Missing required parameter: '{param}'.", param=param)
    match = _AT.match(message)
    text, param = (match[1], (match[2] or "").lstrip(".")) if match else (message, "")
    # The key of a map is the client's, and a place in a list of plain values says little: the map or list is meant.
    param = param.replace("[...]", "")
    param = param if text.startswith("Expected `object") else _IN_LIST.sub(r"\1", param)
    where = f" for '{param}'" if param else ""
    if unknown := _UNKNOWN_TAG.match(text):
        return ApiError("invalid_value", f"Invalid value: '{unknown[1][:64]}'{where}.", param=param or None)
    if text.startswith("Expected `object`, got") and not param:
        return ApiError("invalid_type", f"The request body must be a JSON object: {text}.")
    if wrong := _WRONG_TYPE.match(text):
        got = f", but got {_nouns(wrong[2])} instead" if wrong[2] else ""
        message = f"Invalid type{where}: expected {_nouns(wrong[1])}{got}."
        return ApiError("invalid_type", message, param=param or None)
    code = "invalid_type" if ", got" in text else "invalid_value"
    return ApiError(code, f"Invalid value{where}: {text}.", param=param or None)


def _nouns(types: str) -> str:
    """msgspec's names of types in words; that null is taken as absence needs no mention."""
    names = [name for name in types.split(" | ") if name != "null"] or ["null"]
    return " or ".join(_NOUNS.get(name, name) for name in names)
