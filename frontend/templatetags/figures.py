"""How figures are written: short, with units, and a dash where nothing is known."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation

from django import template

__all__ = ["age", "amount", "clock", "count", "duration", "milliseconds", "percent", "rate", "target"]

register = template.Library()
UNKNOWN = "–"


@register.filter
def count(value: float | None) -> str:
    """A whole number with thousands apart."""
    return UNKNOWN if value is None else f"{value:,.0f}"


@register.filter
def rate(value: float | None) -> str:
    """A rate: one decimal while it is small enough for that to matter."""
    if value is None:
        return UNKNOWN
    return f"{value:,.1f}" if 0 < value < 100 else f"{value:,.0f}"


@register.filter
def duration(seconds: float | None) -> str:
    """Seconds as the two most telling digits: 85 ms, 1.24 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds is None:
        return UNKNOWN
    seconds = float(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@register.filter
def age(seconds: float | None) -> str:
    """An age: tenths while they matter, so that a moving figure is seen to move."""
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


@register.filter
def milliseconds(value: float | None) -> str:
    """Milliseconds as `duration` writes them."""
    return UNKNOWN if value is None else duration(value / 1000)


@register.filter
def target(value: float | None) -> str:
    """A configured number of milliseconds, as short as it was meant: 250 ms, 1 s, 60 s."""
    if value is None:
        return UNKNOWN
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"


@register.filter
def percent(share: float | None) -> str:
    """A share of 1. Rounded down, so that 100 % means all of them."""
    if share is None:
        return UNKNOWN
    tenths = int(share * 1000 + 1e-9)
    return f"{tenths / 10:.0f} %" if tenths % 10 == 0 else f"{tenths / 10:.1f} %"


@register.filter
def amount(money: str | Decimal | None) -> str:
    """An amount of money, exact: never rounded, only padded (to cents; below one unit to millionths, to line up)."""
    if money is None:
        return UNKNOWN
    try:
        value = Decimal(money)
    except InvalidOperation:
        return UNKNOWN
    text = f"{value:,f}"
    whole, _, decimals = text.partition(".")
    places = 2 if abs(value) >= 1 or not value else 6
    return f"{whole}.{decimals.rstrip('0').ljust(places, '0')}"


@register.filter
def clock(at_ms: int | None) -> str:
    """Wall time of day in UTC."""
    return UNKNOWN if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S")
