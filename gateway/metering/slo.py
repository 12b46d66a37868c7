"""The verdict on one request, from its facts alone: what was promised, what the client saw."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Targets", "Verdict", "judge"]


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


def judge(
    targets: Targets | None, *, status: int, ttft_s: float | None, tpot_s: float | None, total_s: float
) -> Verdict:
    """TTFT: first content within its target. TPOT: mean time per token after the first within its own.

    Without content the first is missed once the target had passed, and unknown when the client left before that. A
    single token has no TPOT and can't miss it. Refused, failed and abandoned requests are never good.
    """
    if targets is None:
        return Verdict(None, None, False)
    if ttft_s is not None:
        ttft_met: bool | None = ttft_s * 1000 <= targets.ttft_ms
    else:
        ttft_met = False if total_s * 1000 > targets.ttft_ms or status >= 500 else None
    tpot_met = None if tpot_s is None else tpot_s * 1000 <= targets.tpot_ms
    return Verdict(ttft_met, tpot_met, status == 200 and ttft_met is True and tpot_met is not False)
