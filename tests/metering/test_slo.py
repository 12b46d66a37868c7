"""The verdict on one request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metering.slo import Targets, Verdict, judge
from gateway.metering.window import percentile

TARGETS = Targets(ttft_ms=2000, tpot_ms=150)


@pytest.mark.parametrize(
    ("status", "ttft_s", "tpot_s", "total_s", "expected"),
    [
        (200, 0.5, 0.05, 3.0, Verdict(True, True, True)),
        (200, 2.0, 0.15, 3.0, Verdict(True, True, True)),  # the target itself is met
        (200, 2.001, 0.05, 3.0, Verdict(False, True, False)),
        (200, 0.5, 0.151, 3.0, Verdict(True, False, False)),
        (200, 0.5, None, 0.6, Verdict(True, None, True)),  # one token: no time between tokens to miss
        (499, None, None, 0.4, Verdict(None, None, False)),  # left before it could be told
        (499, None, None, 2.5, Verdict(False, None, False)),  # left after the target had passed
        (499, 0.5, 0.05, 1.0, Verdict(True, True, False)),  # abandoned: never good
        (503, None, None, 0.1, Verdict(False, None, False)),
        (200, None, None, 0.1, Verdict(None, None, False)),
    ],
)
def test_verdicts(status: int, ttft_s: float | None, tpot_s: float | None, total_s: float, expected: Verdict) -> None:
    assert judge(TARGETS, status=status, ttft_s=ttft_s, tpot_s=tpot_s, total_s=total_s) == expected


def test_without_targets_nothing_is_met_or_missed() -> None:
    assert judge(None, status=200, ttft_s=0.1, tpot_s=0.1, total_s=1.0) == Verdict(None, None, False)


@given(st.lists(st.floats(0, 1e6), max_size=50), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_percentile_is_a_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    if not values:
        assert found is None
        return
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values)
    assert all(sum(v <= x for v in values) < share * len(values) for x in values if x < found)
