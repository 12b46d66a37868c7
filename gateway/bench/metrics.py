"""The definitions, and nothing else: from the timeline of each request to the figures of a run.

TTFT = scheduled send to first non-empty content (a role-only chunk is no content). TPOT = (last - first) / (n - 1).
Gaps are pooled over all requests; a stall is the longest gap of one request. Goodput = requests that met all their
objectives / requests OFFERED: a refused, failed or abandoned request is a miss. Times are seconds from the run's start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

__all__ = ["P99_NEEDS", "Report", "Slo", "Spread", "Summary", "Trace"]

P99_NEEDS = 400
"""With fewer values a 99th percentile is one of the four largest: noise, so it isn't shown."""

Ending = Literal["ok", "refused", "failed", "abandoned"]


@dataclass(slots=True)
class Trace:
    """What the client saw of one request, filled in as it goes: abandoned until it is known to have ended otherwise."""

    index: int
    tenant: str
    scheduled_s: float
    sent_s: float
    end_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    """Arrival of every piece of non-empty content."""
    ending: Ending = "abandoned"
    status: int = 0
    code: str = "stopped"
    """Why it didn't end well."""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    usage_tokens: int | None = None
    """Completion tokens by the server's own count; None when it gave no usage."""
    finish: str = ""
    text: str = ""

    @property
    def output_tokens(self) -> int:
        return len(self.chunks_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.chunks_s[0] - self.scheduled_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        n = self.output_tokens
        return (self.chunks_s[-1] - self.chunks_s[0]) / (n - 1) if self.chunks_s and n > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.chunks_s)]

    @property
    def stall_s(self) -> float | None:
        return max(self.gaps_s, default=None)

    @property
    def total_s(self) -> float:
        return self.end_s - self.scheduled_s


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of every request, in milliseconds; None: not asked for."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    stall_ms: float | None = None
    total_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From `ttft=500ms,tpot=50,total=20s` (plain numbers are milliseconds). Raises ValueError."""
        found: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            match = re.fullmatch(r"(ttft|tpot|stall|total)=(\d+(?:\.\d+)?)(ms|s)?", part)
            if not match:
                raise ValueError(f"{part!r} is not an objective: write ttft=500ms,tpot=50ms,stall=1s,total=20s")
            found[f"{match[1]}_ms"] = float(match[2]) * (1000 if match[3] == "s" else 1)
        return cls(**found)

    def met(self, trace: Trace) -> bool:
        """A finished request with a single token has no TPOT and no stall and can't miss those."""
        if trace.ending != "ok" or (self.ttft_ms is not None and trace.ttft_s is None):
            return False
        measured = (trace.ttft_s, trace.tpot_s, trace.stall_s, trace.total_s)
        wanted = (self.ttft_ms, self.tpot_ms, self.stall_ms, self.total_ms)
        return all(w is None or m is None or m * 1000 <= w for m, w in zip(measured, wanted, strict=True))


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of `n` values (milliseconds), linear between ranks."""

    n: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float | None
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Spread | None:
        values = sorted(1000 * s for s in seconds if s is not None)
        if not values:
            return None
        n = len(values)
        p99 = percentile(values, 0.99) if n >= P99_NEEDS else None
        p50, p90, p95 = (percentile(values, q) for q in (0.5, 0.9, 0.95))
        return cls(n, sum(values) / n, p50, p90, p95, p99, values[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. None: not measurable from what the server sent."""

    offered: int
    ok: int
    refused: int
    failed: int
    abandoned: int
    duration_s: float
    """First scheduled send to the end of the last request."""
    counted_by: str
    """Where output token counts come from: usage, chunks (one token each assumed) or mixed."""
    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int
    output_per_s: float
    total_per_s: float | None
    requests_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    gap_ms: Spread | None
    stall_ms: Spread | None
    total_ms: Spread | None
    goodput: float | None
    goodput_per_s: float | None
    send_lag_ms: float
    """The worst delay between scheduled and real send: if it isn't small, the client was the bottleneck."""
    errors: dict[str, int]


@dataclass(slots=True)
class Report:
    """One run: what was asked, the timelines, and whether it was stopped early."""

    label: str
    traces: list[Trace] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def tenants(self) -> list[str]:
        return sorted({t.tenant for t in self.traces})

    def only(self, tenant: str) -> Report:
        """The same run seen by one tenant."""
        return Report(tenant, [t for t in self.traces if t.tenant == tenant], self.config, self.interrupted)

    def summary(self, slo: Slo | None = None) -> Summary:
        """Latencies and tokens are those of requests that ended well; the others only count as offered."""
        good = [t for t in self.traces if t.ending == "ok"]
        start = min((t.scheduled_s for t in self.traces), default=0.0)
        duration = max((t.end_s for t in self.traces), default=0.0) - start
        per_s = 1 / duration if duration > 0 else 0.0
        output = sum(t.output_tokens for t in good)
        prompt = None
        if all(t.prompt_tokens is not None for t in good):
            prompt = sum(t.prompt_tokens or 0 for t in good)
        met = sum(slo.met(t) for t in self.traces) if slo else None
        return Summary(
            offered=len(self.traces),
            ok=len(good),
            refused=sum(t.ending == "refused" for t in self.traces),
            failed=sum(t.ending == "failed" for t in self.traces),
            abandoned=sum(t.ending == "abandoned" for t in self.traces),
            duration_s=duration,
            counted_by=_counted_by(good),
            output_tokens=output,
            prompt_tokens=prompt,
            cached_tokens=sum(t.cached_tokens for t in good),
            output_per_s=output * per_s,
            total_per_s=None if prompt is None else (prompt + output) * per_s,
            requests_per_s=len(good) * per_s,
            ttft_ms=Spread.of(t.ttft_s for t in good),
            tpot_ms=Spread.of(t.tpot_s for t in good),
            gap_ms=Spread.of(gap for t in good for gap in t.gaps_s),
            stall_ms=Spread.of(t.stall_s for t in good),
            total_ms=Spread.of(t.total_s for t in good),
            goodput=None if met is None or not self.traces else met / len(self.traces),
            goodput_per_s=None if met is None else met * per_s,
            send_lag_ms=1000 * max((t.sent_s - t.scheduled_s for t in self.traces), default=0.0),
            errors=_errors(self.traces),
        )

    def to_dict(self, slo: Slo | None = None, *, requests: bool = True) -> dict[str, Any]:
        """JSON-able: the figures, each tenant's figures, and every request's timeline without its text."""
        tenants = self.tenants()
        found: dict[str, Any] = {
            "label": self.label,
            "config": self.config,
            "interrupted": self.interrupted,
            "slo": asdict(slo) if slo else None,
            "summary": asdict(self.summary(slo)),
            "tenants": {t: asdict(self.only(t).summary(slo)) for t in tenants} if len(tenants) > 1 else {},
        }
        if requests:
            found["requests"] = [{k: v for k, v in asdict(t).items() if k != "text"} for t in self.traces]
        return found


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, linear between ranks."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _counted_by(good: list[Trace]) -> str:
    kinds = {"chunks" if t.usage_tokens is None else "usage" for t in good}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "none"


def _errors(traces: list[Trace]) -> dict[str, int]:
    found: dict[str, int] = {}
    for trace in traces:
        if trace.ending != "ok":
            key = f"{trace.status or '-'} {trace.code}".strip()
            found[key] = found.get(key, 0) + 1
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
