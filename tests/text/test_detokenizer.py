from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import Detokenizer, Tokenizer
from tests.text.toy import toy

TOY = toy()


def joined(tokenizer: Tokenizer, parts: list[list[int]]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(detokenizer.push(part) for part in parts) + detokenizer.flush()


def cut(ids: list[int], places: set[int]) -> list[list[int]]:
    edges = [0, *sorted(p for p in places if 0 < p < len(ids)), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@settings(derandomize=True, max_examples=200)
@given(st.text(max_size=40), st.sets(st.integers(0, 80)))
def test_text_comes_back_whole_however_it_is_cut(text: str, places: set[int]) -> None:
    ids = TOY.encode(text)
    assert TOY.decode(ids) == text
    assert joined(TOY, cut(ids, places)) == text


@settings(derandomize=True, max_examples=300)
@given(st.lists(st.integers(0, 419), max_size=30), st.sets(st.integers(0, 30)))
def test_any_ids_join_to_the_full_decode(ids: list[int], places: set[int]) -> None:
    assert joined(TOY, cut(ids, places)) == TOY.decode(ids)


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.integers(0, 419), max_size=30), st.integers(0, 30))
def test_state_is_json_and_goes_on_elsewhere(ids: list[int], at: int) -> None:
    first, second = Detokenizer(TOY), Detokenizer(TOY)
    text = first.push(ids[:at])
    second.restore(json.loads(json.dumps(first.state())))
    assert text + second.push(ids[at:]) + second.flush() == TOY.decode(ids)


def test_an_unfinished_character_is_held_not_replaced() -> None:
    ids = [i for byte in "é🦊".encode() for i in ids_of_byte(byte)]
    detokenizer = Detokenizer(TOY)
    assert [detokenizer.push([i]) for i in ids] == ["", "é", "", "", "", "🦊"]
    assert detokenizer.flush() == ""


def test_bytes_that_cannot_be_utf8_become_replacement_characters() -> None:
    ids = [i for byte in b"a\xffb\xf0\x9f" for i in ids_of_byte(byte)]
    assert joined(TOY, [[i] for i in ids]) == "a\ufffdb\ufffd"


def test_special_tokens_have_no_text() -> None:
    ids = [*TOY.encode("hi"), 2]
    assert TOY.decode(ids) == "hi"
    assert TOY.decode(ids, skip_special=False) == "hi<|im_end|>"


def ids_of_byte(byte: int) -> list[int]:
    return [next(i for i in range(420) if TOY.token_bytes(i) == bytes([byte]))]
