"""Which JSON Schemas can be enforced: what is wrong shows here with its place, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from gateway.errors import ApiError

__all__ = ["checked_schema"]

MAX_BYTES: Final = 128 * 1024
MAX_DEPTH: Final = 24
MAX_PARTS: Final = 5000
"""Subschemas of one schema."""

_TYPES: Final = {"string", "number", "integer", "boolean", "array", "object", "null"}
_REFUSED: Final = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
}  # fmt: skip
"""What can't be decided token by token."""
_FORMATS: Final = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES: Final = ("items", "additionalProperties", "additionalItems")
_RENAMED: Final = {"items": "prefixItems", "additionalItems": "items"}
"""In a tuple: what JSON Schema calls since 2020 what it called otherwise before."""
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def checked_schema(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """The schema as it is enforced. Raises `ApiError`.

    Formats that nobody checks go (the specification calls them annotations). Objects whose properties are named get no
    others where the schema leaves that open: a small model would not stop inventing some. Both allow only what the
    given schema allows. A list under `items` is told as `prefixItems`.
    """
    if len(msgspec.json.encode(schema)) > MAX_BYTES:
        raise _refusal(param, f"a schema has at most {MAX_BYTES // 1024} KiB")
    parts, closes = 0, True
    todo: list[tuple[str, Any, int]] = [(param, schema, 0)]
    while todo:
        where, part, depth = todo.pop()
        if isinstance(part, bool):
            continue
        parts += 1
        if depth > MAX_DEPTH:
            raise _refusal(where, f"schemas are nested at most {MAX_DEPTH} levels deep")
        if parts > MAX_PARTS:
            raise _refusal(param, f"a schema has at most {MAX_PARTS} parts")
        if not isinstance(part, dict):
            raise _refusal(where, "a schema is an object or a boolean")
        _check_keywords(where, part)
        # Where schemas add up, each knows only its own properties; of `oneOf` a narrower branch may let more through.
        joined = part.keys() & {"allOf", "oneOf"} or ("properties" in part and part.keys() & {"$ref", "anyOf"})
        closes = closes and not joined
        todo.extend((at, inner, depth + 1) for at, inner in _inner(where, part))
    return _enforced(schema, schema, closes)


def _check_keywords(where: str, part: dict[str, Any]) -> None:
    for keyword in part:
        if keyword in _REFUSED and part[keyword] is not False:
            raise _refusal(f"{where}.{keyword}", f"the keyword '{keyword}' is not supported")
    kinds = part.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _refusal(f"{where}.type", f"{_shown(kind)} is not a type of JSON")
    if not _texts(part.get("required", [])):
        raise _refusal(f"{where}.required", "it is a list of property names")
    if "enum" in part and not isinstance(part["enum"], list):
        raise _refusal(f"{where}.enum", "it is a list of values")
    if _is_tuple(part) and "prefixItems" in part:
        raise _refusal(f"{where}.items", "beside 'prefixItems' it is one schema, no list")
    reference = part.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _refusal(f"{where}.$ref", "only references inside the schema ('#/...') are followed")
    for keyword in _COUNTS:
        value = part.get(keyword, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _refusal(f"{where}.{keyword}", "it is a whole number, not negative")
    for keyword in _NUMBERS:
        value = part.get(keyword, 1)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _refusal(f"{where}.{keyword}", "it is a number")
    for keyword in ("pattern", "format"):
        if not isinstance(part.get(keyword, ""), str):
            raise _refusal(f"{where}.{keyword}", "it is a string")


def _inner(where: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where else schemas stand in this one."""
    for keyword in _MAPS:
        named = part.get(keyword, {})
        if not isinstance(named, dict):
            raise _refusal(f"{where}.{keyword}", "it is an object of schemas")
        yield from ((f"{where}.{keyword}.{name[:64]}", inner) for name, inner in named.items())
    is_tuple = _is_tuple(part)
    for keyword in (*_LISTS, "items") if is_tuple else _LISTS:
        listed = part.get(keyword, [])
        if not isinstance(listed, list) or (keyword in part and not listed):
            raise _refusal(f"{where}.{keyword}", "it is a list of schemas, not empty")
        yield from ((f"{where}.{keyword}[{i}]", inner) for i, inner in enumerate(listed))
    for keyword in _SINGLES:
        if keyword in part and not (is_tuple and keyword == "items"):
            yield f"{where}.{keyword}", part[keyword]


def _is_tuple(part: dict[str, Any]) -> bool:
    return isinstance(part.get("items"), list)


def _of_today(part: dict[str, Any]) -> dict[str, Any]:
    """A tuple as JSON Schema wrote it before 2020, and Pydantic 1 still does, as it is written since."""
    result = {keyword: value for keyword, value in part.items() if keyword not in ("items", "additionalItems")}
    result["prefixItems"] = part["items"]
    return result | ({"items": part["additionalItems"]} if "additionalItems" in part else {})


def _reference_of_today(reference: str, root: dict[str, Any]) -> str:
    """A reference through a tuple, to where its parts stand once the tuple is written as of today."""
    head, *steps = reference.split("/")
    at: Any = root
    is_schema = True  # or else a map or a list of schemas
    for i, step in enumerate(steps):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        is_tuple = is_schema and isinstance(at, dict) and _is_tuple(at)
        if is_tuple:
            steps[i] = _RENAMED.get(name, step)
        holds_more = name in _MAPS or name in _LISTS or (is_tuple and name == "items")
        if is_schema and not holds_more and name not in _SINGLES:
            break  # into a value, such as that of `const`, where names mean nothing
        is_schema = not (is_schema and holds_more)
        at = _step(at, name)
    return "/".join([head, *steps])


def _step(value: Any, name: str) -> Any:
    """What a step of a reference leads to; None where it leads nowhere, which whoever compiles the schema says."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return None


def _enforced(part: Any, root: dict[str, Any], closes: bool) -> Any:
    if not isinstance(part, dict):
        return part
    part = _of_today(part) if _is_tuple(part) else part
    result = dict(part)
    if closes and "additionalProperties" not in part and _named(part):
        result["additionalProperties"] = False
    if "$ref" in part:
        result["$ref"] = _reference_of_today(part["$ref"], root)
    if "format" in part and part["format"] not in _FORMATS:
        del result["format"]
    for keyword in _REFUSED & result.keys():  # those left are false: the same as absent
        del result[keyword]
    for keyword in _MAPS:
        if keyword in part:
            result[keyword] = {name: _enforced(inner, root, closes) for name, inner in part[keyword].items()}
    for keyword in _LISTS:
        if keyword in part:
            result[keyword] = [_enforced(inner, root, closes) for inner in part[keyword]]
    for keyword in _SINGLES:
        if keyword in part:
            result[keyword] = _enforced(part[keyword], root, closes)
    return result


def _named(part: dict[str, Any]) -> bool:
    """All properties that the object needs are named."""
    names = part.get("properties")
    if not names or "patternProperties" in part or part.get("minProperties", 0) > len(names):
        return False
    return set(part.get("required", ())) <= names.keys()


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _shown(value: Any) -> str:
    return repr(value)[:64]


def _refusal(where: str, why: str) -> ApiError:
    return ApiError("invalid_grammar", f"Invalid schema at '{where}': {why}.", param=where)
