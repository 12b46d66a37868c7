"""The versions a batch of requests may be rated with, read once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q

from tenants.billing.models import PriceVersion
from tenants.billing.rating import PriceFacts

__all__ = ["DEFAULT_CLASS", "PriceBook"]

DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class _Interval:
    start: datetime
    end: datetime | None
    facts: PriceFacts

    def holds(self, at: datetime) -> bool:
        return self.start <= at and (self.end is None or at < self.end)


class PriceBook:
    """Published versions of some price classes (and `default`) between two instants."""

    def __init__(self, price_classes: Iterable[str], earliest: datetime, latest: datetime) -> None:
        self._intervals: dict[str, list[_Interval]] = defaultdict(list)
        rows = PriceVersion.objects.select_related("price").filter(
            Q(valid_to__isnull=True) | Q(valid_to__gt=earliest),
            price__price_class__in={*price_classes, DEFAULT_CLASS},
            published_at__isnull=False,
            valid_from__lte=latest,
        )
        for row in rows:
            facts = PriceFacts(
                row.pk,
                row.price.currency,
                row.input_nano_per_mtok,
                row.cached_nano_per_mtok,
                row.output_nano_per_mtok,
            )
            self._intervals[row.price.price_class].append(_Interval(row.valid_from, row.valid_to, facts))

    def at(self, price_class: str, at: datetime) -> PriceFacts | None:
        """The version in force, of the class or else of `default`; None where neither has one (I4)."""
        for name in (price_class, DEFAULT_CLASS):
            for interval in self._intervals[name]:
                if interval.holds(at):
                    return interval.facts
        return None
