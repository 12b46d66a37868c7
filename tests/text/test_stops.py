from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import StopScanner


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Feed pieces until a hit, like the engine does; return all that was emitted and the hit."""
    scanner, emitted = StopScanner(stops), ""
    for piece in pieces:
        text, hit = scanner.push(piece)
        emitted += text
        if hit is not None:
            return emitted, hit
    return emitted + scanner.flush(), None


def cuts(text: str, places: set[int]) -> list[str]:
    edges = [0, *sorted(p for p in places if 0 < p < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("size", range(1, 12))
def test_the_same_text_cut_at_every_boundary(size: int) -> None:
    text = "one two STO STOP three"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert scan(["STOP", "###"], pieces) == ("one two STO ", "STOP")


letters = st.text(alphabet="ab ", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(derandomize=True, max_examples=400)
@given(letters, stop_lists, st.sets(st.integers(0, 24)))
def test_the_result_does_not_depend_on_where_the_text_is_cut(text: str, stops: list[str], places: set[int]) -> None:
    assert scan(stops, cuts(text, places)) == scan(stops, list(text))


@settings(derandomize=True, max_examples=400)
@given(letters, stop_lists, st.sets(st.integers(0, 24)))
def test_no_part_of_a_stop_string_leaks_and_nothing_else_is_lost(text: str, stops: list[str], places: set[int]) -> None:
    emitted, hit = scan(stops, cuts(text, places))
    assert not any(stop in emitted for stop in stops)
    assert (emitted == text) if hit is None else text.startswith(emitted + hit)


def test_what_may_begin_a_stop_is_held_and_then_let_go() -> None:
    scanner = StopScanner(["</end>"])
    assert scanner.push("hi </en") == ("hi ", None)
    assert scanner.push("t") == ("</ent", None)
    assert scanner.push(" <") == (" ", None)
    assert scanner.flush() == "<"


def test_the_first_to_be_complete_wins_and_of_two_the_longer() -> None:
    assert scan(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert scan(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_state_moves_to_another_scanner() -> None:
    first, second = StopScanner(["STOP"]), StopScanner(["STOP"])
    assert first.push("go ST") == ("go ", None)
    second.restore(first.state())
    assert second.push("OP!") == ("", "STOP")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["a", ""])
