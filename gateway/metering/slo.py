"""The verdict on one request, from its facts alone: what was promised, what the client saw."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SERVED", "Seen", "Targets", "Verdict", "judge"]

SERVED = frozenset({"stop", "length", "tool_calls", "content_filter"})
"""Reasons of a request that was answered."""


@dataclass(frozen=True, slots=True)
class Targets:
    """A tier's latency targets in ms, those in force when the request was admitted."""

    ttft_ms: int
    tpot_ms: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """None: the request ended before it could be told. `good`: it was served and met every target (goodput)."""

    ttft_met: bool | None
    tpot_met: bool | None
    good: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw of one request. Times in seconds; None: never reached."""

    stream: bool
    status: int
    reason: str
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    tokens: int


def judge(targets: Targets | None, seen: Seen) -> Verdict:
    """A stream: first content within the TTFT target, mean time per token after it within the TPOT target.

    Without content the first is missed once its target had passed, and unknown when the client left before that. A
    single token has no TPOT and can't miss it. An answer in one piece is due when its last token would be due in a
    stream: after TTFT + (tokens - 1) x TPOT. What was refused, failed or abandoned is never good, also when it failed
    after a first byte with status 200.
    """
    if targets is None:
        return Verdict(None, None, False)
    served = seen.status == 200 and seen.reason in SERVED
    if seen.stream:
        first_s, due_ms = seen.ttft_s, targets.ttft_ms
    else:
        first_s = seen.total_s if served else None
        due_ms = targets.ttft_ms + max(0, seen.tokens - 1) * targets.tpot_ms
    if first_s is not None:
        ttft_met: bool | None = first_s * 1000 <= due_ms
    else:
        ttft_met = False if seen.total_s * 1000 > due_ms or seen.status >= 500 else None
    tpot_met = None if seen.tpot_s is None or not seen.stream else seen.tpot_s * 1000 <= targets.tpot_ms
    return Verdict(ttft_met, tpot_met, served and ttft_met is True and tpot_met is not False)
