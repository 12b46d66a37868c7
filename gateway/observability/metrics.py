"""Prometheus figures of one data-plane process, made from the same records as everything else: outcomes and refusals.

Labels are few and bounded: tiers, models of the registry, codes of the table. Tenants are not among them: a label per
customer grows without bound, and what belongs to a tenant is shown by the console.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.protocol.messages import Outcome, Refusal

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_TOTAL_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts records as they are written; `render` gives the exposition."""

    def __init__(self, open_requests: Callable[[], int], connected: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry, "namespace": "sluice"}
        where = ("model", "tier")
        self._requests = Counter("requests", "Admitted requests that ended.", (*where, "kind", "status"), **make)
        self._errors = Counter(
            "request_errors", "Admitted requests that ended with an error.", (*where, "code"), **make
        )
        self._refusals = Counter("refusals", "Requests that were not admitted.", ("status", "code"), **make)
        self._prompt = Counter("prompt_tokens", "Prompt tokens of admitted requests.", where, **make)
        self._delivered = Counter("delivered_tokens", "Output tokens handed to clients.", where, **make)
        self._ttft = Histogram("ttft_seconds", "Arrival to first delivery.", where, buckets=_TTFT_S, **make)
        self._tpot = Histogram("tpot_seconds", "Mean time between delivered tokens.", where, buckets=_TPOT_S, **make)
        self._stall = Histogram("stall_seconds", "Longest gap of a stream.", where, buckets=_TPOT_S, **make)
        self._total = Histogram("request_seconds", "Arrival to the end.", where, buckets=_TOTAL_S, **make)
        Gauge("open_requests", "Requests of this process in flight.", **make).set_function(open_requests)
        Gauge("lease_held", "1 while Redis answers this process.", **make).set_function(connected)

    def outcome(self, o: Outcome) -> None:
        """An admitted request has ended."""
        where = (o.model, o.tier)
        self._requests.labels(*where, o.kind, str(o.status)).inc()
        if o.code:
            self._errors.labels(*where, o.code).inc()
        self._prompt.labels(*where).inc(o.prompt_tokens)
        self._delivered.labels(*where).inc(o.delivered_tokens)
        self._total.labels(*where).observe(o.total_s)
        for histogram, seconds in ((self._ttft, o.ttft_s), (self._tpot, o.tpot_s), (self._stall, o.stall_s)):
            if seconds is not None:
                histogram.labels(*where).observe(seconds)

    def refusal(self, r: Refusal) -> None:
        """A request was turned away. Its model is what a client wrote, so it is no label."""
        self._refusals.labels(str(r.status), r.code).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
