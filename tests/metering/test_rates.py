"""Rates from counters: of the engines that are heard, over the seconds they were heard in."""

from __future__ import annotations

from typing import Any

from gateway.metering.rates import TokenRates
from tests.metering.servers import heartbeat

A, B = ("interactive", "acme"), ("batch", "umbrella")


def beat(at_ms: int, a: int | None = None, b: int | None = None, **fields: Any) -> Any:
    made = {":".join(group): count for group, count in ((A, a), (B, b)) if count is not None}
    return heartbeat(at_ms=at_ms, made=made, **fields)


def test_rates_are_growth_over_time_and_add_up_over_engines() -> None:
    rates = TokenRates()
    rates.take([beat(1000, 0), beat(1000, 100, engine="e2")], 1000)
    rates.take([beat(3000, 60, 8), beat(3000, 110, engine="e2")], 3000)
    assert rates.rates() == {A: 30 + 5, B: 4}
    rates.take([beat(3000, 60, 8), beat(3000, 110, engine="e2")], 3500)  # the same beats again
    assert rates.rates() == {A: 35, B: 4}


def test_only_the_last_seconds_count() -> None:
    rates = TokenRates()
    for second in range(31):
        rates.take([beat(second * 1000, 100 * min(second, 20))], second * 1000)
    assert rates.rates() == {A: 0.0}


def test_a_restarted_engine_counts_anew_and_a_silent_one_not_at_all() -> None:
    rates = TokenRates()
    rates.take([beat(1000, 5000)], 1000)
    rates.take([beat(2000, 10, started_ms=1500)], 2000)
    rates.take([beat(4000, 50, started_ms=1500)], 4000)
    assert rates.rates() == {A: 20}
    rates.take([], 10_000)
    assert rates.rates() == {}
