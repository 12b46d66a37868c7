"""I5: rating is exact."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.billing.rating import PriceFacts, charge, hold_nano, nano, rate

counts = st.integers(0, 10**9)
rates = st.integers(0, 10**12)
prices = st.builds(PriceFacts, st.just(1), st.just("USD"), rates, rates, rates)


@given(prices, counts, counts, counts)
def test_i5_a_charge_is_exact_and_the_sum_of_its_parts(price: PriceFacts, fresh: int, cached: int, made: int) -> None:
    with localcontext(prec=6):  # whatever the caller's context, nothing is rounded
        parts = rate(price, fresh + cached, cached, made)
        total = charge(price, fresh + cached, cached, made)
    expected = Fraction(
        fresh * price.input_nano_per_mtok + cached * price.cached_nano_per_mtok + made * price.output_nano_per_mtok,
        10**15,
    )
    assert Fraction(total) == expected
    assert Fraction(parts.input) + Fraction(parts.cached) + Fraction(parts.output) == expected
    exponent = total.as_tuple().exponent
    assert isinstance(exponent, int) and exponent >= -15


@given(prices, counts, st.integers(0, 10**6), st.integers(1, 8), st.data())
def test_a_hold_covers_whatever_the_request_may_come_to(
    price: PriceFacts, prompt: int, cap: int, choices: int, data: st.DataObject
) -> None:
    hold = hold_nano(price, prompt, cap, choices)
    cached = data.draw(st.integers(0, prompt))
    made = data.draw(st.integers(0, cap * choices))
    assert Fraction(hold, 10**9) >= Fraction(charge(price, prompt, cached, made))
    dearest = max(price.input_nano_per_mtok, price.cached_nano_per_mtok)
    exact = Fraction(prompt * dearest + cap * choices * price.output_nano_per_mtok, 10**6)
    assert 0 <= hold - exact < 1


@given(st.decimals("-1e12", "1e12", places=15))
def test_a_balance_in_nano_units_is_never_more_than_the_ledger_has(amount: Decimal) -> None:
    assert 0 <= Fraction(amount) * 10**9 - nano(amount) < 1


def test_nonsense_is_refused() -> None:
    price = PriceFacts(1, "USD", 1, 1, 1)
    for counts_ in ((-1, 0, 0), (0, 0, -1), (5, 6, 0)):
        with pytest.raises(ValueError):
            charge(price, *counts_)
    with pytest.raises(ValueError):
        hold_nano(price, -1, 1, 1)
