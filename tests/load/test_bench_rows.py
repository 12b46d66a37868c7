"""How the row of continuous batching counts: only while every row of the engine is taken."""

import pytest

from gateway.bench.metrics import Report, Trace
from gateway.bench.rows import full_rate


def trace(index: int, sent_s: float, first_s: float, tokens: int, per_s: float) -> Trace:
    chunks = [first_s + n / per_s for n in range(tokens)]
    return Trace(index, "alpha", sent_s, sent_s, chunks[-1], chunks, usage_tokens=tokens)


def test_neither_the_first_prompts_nor_the_last_replies_count() -> None:
    # Two rows, 10 tokens/s each: full from 2.0 (the second's first token) to 7.0 (the last request is sent).
    report = Report("")
    report.traces = [
        trace(0, 0.0, 1.0, 40, 10),  # to 4.9
        trace(1, 0.0, 2.0, 50, 10),  # to 6.9
        trace(2, 5.0, 5.5, 100, 10),
        trace(3, 7.0, 7.5, 100, 10),
    ]
    # After 2.0 and until 7.0: 29 of the first, 49 of the second, 16 of the third (5.5 to 7.0), none of the last.
    assert full_rate(report, 2) == pytest.approx((29 + 49 + 16) / 5.0)


def test_too_few_requests_count_from_the_start() -> None:
    report = Report("")
    report.traces = [trace(0, 0.0, 1.0, 5, 10), trace(1, 0.5, 4.0, 5, 10), trace(2, 2.0, 2.5, 5, 10)]
    assert full_rate(report, 2) == pytest.approx(5 / 2.0)
