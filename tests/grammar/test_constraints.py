"""G1 and G2: what is let through satisfies the constraint, and no state forbids every token."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from engine.text import Tokenizer
from engine.text.grammar import ConstraintError, Vocabulary
from tests.grammar.walk import allowed, walk

WALKS = 12

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "integer", "maximum": 9}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {"at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                              "required": ["x", "y"], "additionalProperties": False}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "grün", "青", 7, None, {"k": [1]}]},
    "const": {"const": {"a": [True, "ß"]}},
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}],
              "items": False, "minItems": 2},
    "refs": {
        "$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer", "maximum": 99, "minimum": 0},
                  "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
                  "required": ["v"], "additionalProperties": False}},
        "$ref": "#/$defs/tree",
    },
    "any of": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}, {"type": "null"}]},
    "one of, told apart": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": k}, k: {"type": "boolean"}}, "required": ["kind", k],
             "additionalProperties": False}
            for k in ("cat", "dog")
        ]
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "date": {"type": "string", "format": "date"},
    "unicode names": {"type": "object", "properties": {"größe": {"enum": ["S", "Ø", "😀"]}}, "required": ["größe"],
                      "additionalProperties": False},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "pattern names": {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
                      "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_ends_satisfies_the_schema(vocabulary: Vocabulary, tokenizer: Tokenizer, name: str) -> None:
    schema = SCHEMAS[name]
    validator = Draft202012Validator(schema)
    texts = [walk(vocabulary, tokenizer, {"kind": "json_schema", "schema": schema}, seed) for seed in range(WALKS)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= WALKS // 2
    for text in ended:
        validator.validate(json.loads(text))


def test_any_object_is_an_object(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    ended = [
        t for seed in range(WALKS) if (t := walk(vocabulary, tokenizer, {"kind": "json_object"}, seed)) is not None
    ]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-\d{2,4}", r"(ja|nein|vielleicht)!?", r"[äöü]+ß", r"日本(語)?"])
def test_a_forced_pattern_is_matched_whole(vocabulary: Vocabulary, tokenizer: Tokenizer, pattern: str) -> None:
    for seed in range(WALKS):
        text = walk(vocabulary, tokenizer, {"kind": "regex", "regex": pattern}, seed)
        assert text is not None and re.fullmatch(pattern, text) and re.fullmatch("[0-9]*", re.sub(r"\D", "", text)), (
            text
        )


def test_a_choice_is_one_of_its_texts(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    texts = ['say "hi"', "two\nlines", "naïve", "naïveté", "😀"]
    seen = {walk(vocabulary, tokenizer, {"kind": "choice", "choice": texts}, seed) for seed in range(40)}
    assert seen <= set(texts) and len(seen) > 2


@pytest.mark.parametrize("grammar", ['start: "a" ("b" | "c")~2 "d"', 'root ::= "a" ("b" | "c"){2} "d"'])
def test_grammars_in_both_dialects(vocabulary: Vocabulary, tokenizer: Tokenizer, grammar: str) -> None:
    if "~" in grammar:
        grammar = grammar.replace("~2", "{2}")
    texts = {walk(vocabulary, tokenizer, {"kind": "lark", "lark": grammar}, seed) for seed in range(20)}
    assert texts <= {"abbd", "abcd", "acbd", "accd"} and len(texts) > 1


def test_a_text_begins_again_from_its_tokens_alone(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """What a parked or moved sequence needs: tokens pushed at once leave the state that one by one leave."""
    tokens = tokenizer.encode('{"name": "Jürgen", "age": 4')
    one_by_one = vocabulary.compile(json.dumps({"kind": "json_schema", "schema": SCHEMAS["flat"]}))
    fresh = one_by_one.copy()
    masks = []
    for token in tokens:
        masks.append(allowed(vocabulary, one_by_one))
        one_by_one.push([token])
    fresh.push(tokens)
    assert np.array_equal(allowed(vocabulary, fresh), allowed(vocabulary, one_by_one))
    fresh.rollback(3)
    assert np.array_equal(allowed(vocabulary, fresh), masks[-3])


def test_blank_space_is_bounded(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    grammar = vocabulary.compile(json.dumps({"kind": "json_object"}))
    grammar.push(tokenizer.encode("{"))
    space = tokenizer.encode("\n")[0]
    count = 0
    while space in allowed(vocabulary, grammar):
        grammar.push([space])
        count += 1
        assert count <= 32
    assert count == 32


def test_a_token_that_may_not_follow_is_an_error(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    grammar = vocabulary.compile(json.dumps({"kind": "regex", "regex": "yes|no"}))
    assert grammar.accepted(tokenizer.encode("no")) == len(tokenizer.encode("no"))
    with pytest.raises(ConstraintError):
        grammar.push(tokenizer.encode("maybe"))


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        ('{"kind": "json_schema", "schema": {"uniqueItems": true}}', "uniqueItems"),
        ('{"kind": "json_schema", "schema": {"type": "strang"}}', "strang"),
        ('{"kind": "json_schema", "schema": {"$ref": "#/$defs/gone"}}', "gone"),
        ('{"kind": "json_schema", "schema": {"$ref": "http://127.0.0.1:1/x.json"}}', "http://127.0.0.1:1/x.json"),
        ('{"kind": "json_schema", "schema": {"enum": []}}', "nsatisfiable"),
        ('{"kind": "json_schema", "schema": {"x-guidance": {"lenient": true}, "uniqueItems": true}}', "uniqueItems"),
        ('{"kind": "regex", "regex": "(a"}', "regex"),
        ('{"kind": "regex", "regex": "(?=a)b"}', "look-around"),
        ('{"kind": "lark", "lark": "start: other"}', "other"),
        ('{"kind": "lark", "lark": "root ::= ("}', "GBNF"),
        ('{"kind": "prose"}', "prose"),
        ("not json", "not a constraint"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(vocabulary: Vocabulary, constraint: str, says: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(says)):
        vocabulary.compile(constraint)
