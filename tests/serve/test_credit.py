"""What an engine offers the queue while works wait for their preparation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.serve.link import Link
from engine.serve.loop import StepLoop


@pytest.mark.parametrize(
    ("credit", "preparing", "cut"),
    [
        ({"interactive": 8, "batch": 2, "+": 4}, 0, {"interactive": 4, "batch": 2}),
        ({"interactive": 3, "+": 4, "+standard": 2}, 0, {"interactive": 3, "+": 1}),
        ({"interactive": 1, "batch": 2, "+": 2}, 0, {"interactive": 1, "batch": 2, "+": 2}),
        ({"+": 9}, 1, {"+": 3}),
        ({"interactive": 1, "+": 1}, 4, {}),
    ],
)
def test_no_more_is_offered_than_may_be_prepared_with_the_rows_for_light_tenants(
    credit: dict[str, int], preparing: int, cut: dict[str, int]
) -> None:
    """A pull takes as many as the largest tier's slots, and those under "+" besides."""
    capacity = SimpleNamespace(max_preparing=4)
    loop = SimpleNamespace(
        backend=SimpleNamespace(capacity=capacity), roster=SimpleNamespace(preparing=preparing), _held_back=False
    )
    offered = StepLoop._prepared_first(cast(Any, loop), credit)
    assert offered == cut
    assert max((n for name, n in offered.items() if name != "+"), default=0) + offered.get("+", 0) <= 4 - preparing
    assert loop._held_back is (cut != credit)


def test_a_request_between_its_channel_and_the_books_is_not_counted() -> None:
    """Below 0 would tell the queue that nothing was: it would take nothing that is on its way from the credit."""
    link = Link()
    link.unspent = 1
    assert link.counted == 0
    link.known |= {"handed", "pulled"}
    assert link.counted == 1
    link.unspent = 0
    assert link.counted == 2
