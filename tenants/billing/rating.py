"""What tokens cost. Pure arithmetic on integers and Decimal: no float, no rounding of a charge (I5)."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal, Inexact

__all__ = ["Charge", "PriceFacts", "charge", "hold_nano", "nano", "rate"]

MTOK = 1_000_000
_SCALE = 15  # nano-units (10^-9) per million (10^6) tokens
_exact = Context(prec=60, traps=[Inexact])


@dataclass(frozen=True, slots=True)
class PriceFacts:
    """A published price version: nano-units of `currency` per million tokens. Cached tokens are prompt tokens."""

    version: int
    currency: str
    input_nano_per_mtok: int
    cached_nano_per_mtok: int
    output_nano_per_mtok: int


@dataclass(frozen=True, slots=True)
class Charge:
    """The parts of one request's cost, exact, in units of the currency, with the tokens each was made of."""

    input_tokens: int
    input: Decimal
    cached_tokens: int
    cached: Decimal
    output_tokens: int
    output: Decimal

    @property
    def total(self) -> Decimal:
        return _exact.add(_exact.add(self.input, self.cached), self.output)


def hold_nano(price: PriceFacts, prompt_tokens: int, max_output_tokens: int, choices: int) -> int:
    """The most that a request can cost, rounded up to a nano-unit; a cache hit or early stop only makes it cheaper."""
    _not_negative(prompt_tokens, max_output_tokens, choices)
    dearest_input = max(price.input_nano_per_mtok, price.cached_nano_per_mtok)
    parts = prompt_tokens * dearest_input + choices * max_output_tokens * price.output_nano_per_mtok
    return -(-parts // MTOK)


def rate(price: PriceFacts, prompt: int, cached: int, completion: int) -> Charge:
    """Cost of the tokens that were really made. `cached` of the `prompt` tokens came from the prefix cache."""
    _not_negative(prompt, cached, completion)
    if cached > prompt:
        raise ValueError(f"{cached} cached tokens of {prompt} prompt tokens")
    fresh = prompt - cached
    return Charge(
        fresh,
        _money(fresh * price.input_nano_per_mtok),
        cached,
        _money(cached * price.cached_nano_per_mtok),
        completion,
        _money(completion * price.output_nano_per_mtok),
    )


def charge(price: PriceFacts, prompt: int, cached: int, completion: int) -> Decimal:
    """Total of `rate`."""
    return rate(price, prompt, cached, completion).total


def nano(amount: Decimal) -> int:
    """Whole nano-units, rounded down: what Redis may count on is never more than what the ledger has."""
    return int(amount.scaleb(9).to_integral_value(ROUND_FLOOR))


def _money(parts: int) -> Decimal:
    return _exact.scaleb(Decimal(parts), -_SCALE)


def _not_negative(*counts: int) -> None:
    if min(counts) < 0:
        raise ValueError("token counts are never negative")
