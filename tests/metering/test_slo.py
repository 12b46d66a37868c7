"""The verdict on one request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metering.slo import Seen, Targets, Verdict, judge
from gateway.metering.window import percentile

TARGETS = Targets(ttft_ms=2000, tpot_ms=150)


def seen(status: int, ttft_s: float | None, tpot_s: float | None, total_s: float, **fields: Any) -> Seen:
    facts: dict[str, Any] = {"stream": True, "reason": "stop" if status == 200 else "error", "tokens": 11}
    return Seen(status=status, ttft_s=ttft_s, tpot_s=tpot_s, total_s=total_s, **(facts | fields))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (seen(200, 0.5, 0.05, 3.0), Verdict(True, True, True)),
        (seen(200, 2.0, 0.15, 3.0), Verdict(True, True, True)),  # the target itself is met
        (seen(200, 2.001, 0.05, 3.0), Verdict(False, True, False)),
        (seen(200, 0.5, 0.151, 3.0), Verdict(True, False, False)),
        (seen(200, 0.5, None, 0.6, tokens=1), Verdict(True, None, True)),  # no time between tokens to miss
        (seen(499, None, None, 0.4), Verdict(None, None, False)),  # left before it could be told
        (seen(499, None, None, 2.5), Verdict(False, None, False)),  # left after the target had passed
        (seen(499, 0.5, 0.05, 1.0, reason="abort"), Verdict(True, True, False)),  # abandoned: never good
        (seen(200, 0.5, 0.05, 1.0, reason="error"), Verdict(True, True, False)),  # failed after the first byte
        (seen(503, None, None, 0.1), Verdict(False, None, False)),
        (seen(200, None, None, 0.1), Verdict(None, None, False)),
        (seen(200, 0.2, None, 3.5, stream=False), Verdict(True, None, True)),  # due after 2 s + 10 x 150 ms
        (seen(200, 0.2, None, 3.501, stream=False), Verdict(False, None, False)),
        (seen(502, 0.2, None, 1.0, stream=False), Verdict(False, None, False)),
        (seen(499, 0.2, None, 1.0, stream=False, reason="abort"), Verdict(None, None, False)),
    ],
)
def test_verdicts(what: Seen, expected: Verdict) -> None:
    assert judge(TARGETS, what) == expected


def test_without_targets_nothing_is_met_or_missed() -> None:
    assert judge(None, seen(200, 0.1, 0.1, 1.0)) == Verdict(None, None, False)


@given(st.lists(st.floats(0, 1e6), max_size=50), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_percentile_is_a_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    if not values:
        assert found is None
        return
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values)
    assert all(sum(v <= x for v in values) < share * len(values) for x in values if x < found)
