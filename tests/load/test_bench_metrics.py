"""The figures against timelines made by hand, and what must hold for any timeline."""

from __future__ import annotations

import math

import numpy
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.bench import Report, Slo, Trace
from gateway.bench.ab import Pair, Ratio, ratios, ratios_table, run_pairs
from gateway.bench.metrics import P99_NEEDS, Ending, Spread

fixed = settings(derandomize=True, max_examples=150, deadline=None)


def trace(
    chunks: list[float], *, ending: Ending = "ok", usage: int | None = None, end: float | None = None, at: float = 0.0,
    prompt: int | None = None, tenant: str = "",
) -> Trace:  # fmt: skip
    end = end if end is not None else chunks[-1] if chunks else at
    code = "" if ending == "ok" else "why"
    return Trace(0, tenant, at, at, end, chunks, ending, 200, code, prompt, 0, usage)


def test_one_timeline_by_hand() -> None:
    t = trace([1.5, 1.6, 1.7, 2.5, 2.6], at=1.0, end=2.75)
    assert t.ttft_s == pytest.approx(0.5)
    assert t.tpot_s == pytest.approx(1.1 / 4)
    assert t.gaps_s == pytest.approx([0.1, 0.1, 0.8, 0.1])
    assert t.stall_s == pytest.approx(0.8)
    assert t.total_s == pytest.approx(1.75)


def test_a_client_that_sends_late_does_not_flatter_the_server() -> None:
    late = Trace(0, "", scheduled_s=1.0, sent_s=3.0, end_s=4.0, chunks_s=[3.5, 4.0], ending="ok")
    assert late.ttft_s == pytest.approx(2.5)
    assert late.total_s == pytest.approx(3.0)
    s = Report("", [late]).summary()
    assert s.duration_s == pytest.approx(3.0)
    assert s.send_lag_ms == pytest.approx(2000)


def test_usage_counts_tokens_where_chunks_carry_several() -> None:
    t = trace([1.0, 2.0], usage=11)
    assert t.output_tokens == 11
    assert t.tpot_s == pytest.approx(0.1)
    assert trace([1.0, 2.0]).output_tokens == 2


def test_what_cannot_be_measured_is_none() -> None:
    assert (trace([]).ttft_s, trace([]).tpot_s, trace([]).stall_s) == (None, None, None)
    assert (trace([1.0]).tpot_s, trace([1.0]).stall_s) == (None, None)
    empty = Report("").summary(Slo(ttft_ms=1))
    assert (empty.ttft_ms, empty.goodput, empty.output_per_s) == (None, None, 0.0)


def test_a_run_by_hand() -> None:
    report = Report("run", [
        trace([1.0, 1.1, 1.2], prompt=10, usage=3),
        trace([2.0, 2.5], at=1.0, prompt=20, usage=2, end=4.0),
        trace([], ending="refused", end=0.1),
        trace([0.2, 0.3], ending="failed", end=0.3),
        trace([3.0], ending="abandoned", end=3.5),
    ])  # fmt: skip
    s = report.summary(Slo(ttft_ms=1000, tpot_ms=100.001))
    assert (s.offered, s.ok, s.refused, s.failed, s.abandoned) == (5, 2, 1, 1, 1)
    assert s.duration_s == pytest.approx(4.0)
    assert s.output_per_s == pytest.approx(5 / 4)
    assert s.total_per_s == pytest.approx(35 / 4)
    assert s.ttft_ms is not None and s.ttft_ms.p50 == pytest.approx(1000)
    assert s.gap_ms is not None and s.gap_ms.n == 3
    assert s.stall_ms is not None and s.stall_ms.max == pytest.approx(500)
    assert s.goodput == pytest.approx(1 / 5), "one of FIVE offered: the second misses TPOT, the others never finished"
    assert s.counted_by == "usage"
    assert s.errors == {"200 why": 3}


def test_counting_is_named_and_total_is_unknown_without_usage() -> None:
    assert Report("", [trace([1.0])]).summary().counted_by == "chunks"
    assert Report("", [trace([1.0])]).summary().total_per_s is None
    assert Report("", [trace([1.0]), trace([1.0], usage=1)]).summary().counted_by == "mixed"


def test_report_is_json_without_texts() -> None:
    report = Report("r", [trace([1.0, 2.0], tenant="a"), trace([1.0], tenant="b")])
    report.traces[0].text = "private"
    found = orjson.loads(orjson.dumps(report.to_dict(Slo(ttft_ms=5))))
    assert set(found["tenants"]) == {"a", "b"}
    assert found["tenants"]["b"]["offered"] == 1
    assert len(found["requests"]) == 2
    assert "private" not in str(found)


def test_objectives_are_parsed_with_units() -> None:
    assert Slo.parse("ttft=0.5s, tpot=50,total=20s,stall=900ms") == Slo(500, 50, 900, 20000)
    for wrong in ("ttft", "ttft=", "ttft=-1", "speed=1", "ttft=5m"):
        with pytest.raises(ValueError, match="not an objective"):
            Slo.parse(wrong)


timelines = st.lists(st.floats(0.001, 5.0), max_size=30).map(
    lambda gaps: [sum(gaps[: i + 1]) for i in range(len(gaps))]
)
traces = st.builds(
    lambda chunks, ending: trace(chunks, ending=ending),
    timelines,
    st.sampled_from(["ok", "ok", "refused", "failed", "abandoned"]),
)


@fixed
@given(timelines.filter(lambda t: len(t) > 1), st.floats(-3.0, 0.0))
def test_parts_of_a_timeline_add_up(chunks: list[float], at: float) -> None:
    t = trace(chunks, at=at)
    assert t.ttft_s is not None and t.tpot_s is not None and t.stall_s is not None
    assert math.isclose(t.ttft_s + sum(t.gaps_s), chunks[-1] - at, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(t.tpot_s * (len(chunks) - 1), sum(t.gaps_s), rel_tol=1e-9, abs_tol=1e-9)
    assert t.stall_s >= t.tpot_s - 1e-9


@fixed
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=450), st.randoms(use_true_random=False))
def test_percentiles_are_those_of_numpy_whatever_the_order(values: list[float], rng: object) -> None:
    rng.shuffle(values)  # type: ignore[attr-defined]
    spread = Spread.of(values)
    assert spread is not None
    expected = numpy.percentile([1000 * v for v in values], [50, 90, 95, 99, 100])
    assert [spread.p50, spread.p90, spread.p95] == pytest.approx(expected[:3])
    assert spread.max == pytest.approx(expected[4])
    assert (spread.p99 is None) == (len(values) < P99_NEEDS)


def test_p99_appears_with_enough_values() -> None:
    values = [i / 1000 for i in range(P99_NEEDS)]
    spread = Spread.of(values)
    assert spread is not None and spread.p99 == pytest.approx(numpy.percentile(range(P99_NEEDS), 99))
    assert Spread.of(values[1:]).p99 is None  # type: ignore[union-attr]


@fixed
@given(st.lists(traces, min_size=1, max_size=12), st.floats(1, 5000), st.floats(1, 5000))
def test_goodput_never_exceeds_success_and_misses_dilute_it(found: list[Trace], ttft: float, tpot: float) -> None:
    slo = Slo(ttft_ms=ttft, tpot_ms=tpot)
    before = Report("", found).summary(slo)
    assert before.goodput is not None
    assert before.goodput <= before.ok / before.offered
    after = Report("", [*found, trace([], ending="refused")]).summary(slo)
    assert after.goodput == pytest.approx(before.goodput * len(found) / (len(found) + 1))
    looser = Report("", found).summary(Slo(ttft_ms=2 * ttft, tpot_ms=2 * tpot))
    assert looser.goodput is not None and looser.goodput >= before.goodput


def _steady(gap: float, tokens: int = 11) -> Report:
    return Report("", [trace([gap * (i + 1) for i in range(tokens)], usage=tokens, prompt=5)])


async def test_pairs_alternate_and_ratios_are_paired() -> None:
    order: list[str] = []
    drift = [1.0, 10.0, 2.0, 5.0, 1.0]

    async def run(side: str, pair: int) -> Report:
        order.append(f"{side}{pair}")
        return _steady(drift[pair] * (0.1 if side == "a" else 0.2))

    pairs = await run_pairs(5, run)
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3", "a4", "b4"]
    by_name = {r.name: r for r in ratios(pairs, Slo(tpot_ms=1e9))}
    assert by_name["output tok/s"].ratio == pytest.approx(2.0), "the machine's drift cancels inside a pair"
    assert by_name["TPOT p50, ms"].ratio == pytest.approx(0.5)
    assert by_name["TPOT p50, ms"].low == pytest.approx(0.5)
    assert by_name["goodput"].ratio == 1.0


def test_the_ratio_is_of_pairs_not_of_medians() -> None:
    gaps = ((0.1, 0.2), (0.3, 0.1), (0.4, 0.8))
    by_name = {r.name: r for r in ratios([Pair(_steady(a), _steady(b)) for a, b in gaps])}
    found = by_name["TPOT p50, ms"]
    assert (found.a, found.b) == (pytest.approx(300), pytest.approx(200))
    assert (found.ratio, found.low, found.high) == (pytest.approx(0.5), pytest.approx(0.5), pytest.approx(3.0))


async def test_an_interrupted_run_ends_the_pairs_without_its_pair() -> None:
    async def run(side: str, pair: int) -> Report:
        report = _steady(0.1)
        report.interrupted = (side, pair) == ("a", 1)
        return report

    assert len(await run_pairs(5, run)) == 1


def test_a_metric_without_figures_has_no_ratio() -> None:
    names = {r.name for r in ratios([Pair(_steady(0.1), Report("", [trace([], ending="failed", end=1.0)]))])}
    assert names == set()


@pytest.mark.parametrize(
    ("better", "ratio", "low", "high", "pairs", "winner"),
    [
        ("more", 1.5, 1.2, 1.9, 5, "new"),
        ("more", 0.5, 0.2, 0.9, 5, "old"),
        ("less", 0.5, 0.2, 0.9, 6, "new"),
        ("less", 1.5, 0.9, 1.9, 5, "unclear"),
        ("more", 1.5, 1.2, 1.9, 4, "unclear"),
    ],
)
def test_a_winner_is_named_only_when_enough_pairs_agree(
    better: str, ratio: float, low: float, high: float, pairs: int, winner: str
) -> None:
    table = ratios_table([Ratio("x", better, 2.0, 1.0, ratio, low, high, pairs)], ("new", "old"))
    assert [*table.columns[-1].cells] == [winner]
