"""The view model: what may be shown, to whom, and what must not look live."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from django.template.loader import render_to_string
from hypothesis import given
from hypothesis import strategies as st

from frontend.board import SHOWN_TENANTS, Board, build
from frontend.charts import meter, sparkline, target_bar
from frontend.history import History
from frontend.snapshot import EVERYTHING, Scope, read
from frontend.templatetags import figures

from . import sample


def board(
    content: dict[str, Any], *, age_s: float = 0.2, scope: Scope = EVERYTHING, history: History | None = None
) -> Board:
    history = history or History()
    snapshot = read(json.dumps(content).encode())
    history.add(snapshot)
    return build(snapshot, age_s=age_s, history=history, scope=scope)


def test_what_nobody_knows_is_a_dash_and_never_a_zero() -> None:
    tiers = [sample.tier("batch", 2, 60_000, [sample.tenant("gamma", money=None)], money=None, currency=None)]
    page = board(sample.snapshot(tiers, []))
    line = page.groups[0].tenants[0].line
    assert (line.ttft_p95_ms, line.compliance, line.money, page.summary["money"]) == (None, None, None, [])
    for write in (figures.count, figures.rate, figures.duration, figures.percent, figures.amount, figures.milliseconds):
        assert write(None) == figures.UNKNOWN


def test_tiers_come_best_first_and_money_is_summed_by_currency() -> None:
    tiers = [
        sample.tier("c", 2, 9, [], money="0.1", currency="EUR"),
        sample.tier("a", 0, 9, [], money="0.1"),
        sample.tier("b", 1, 9, [], money="0.2"),
    ]
    page = board(sample.snapshot(tiers))
    assert [group.tier.tier for group in page.groups] == ["a", "b", "c"]
    assert page.summary["money"] == [("EUR", Decimal("0.1")), ("USD", Decimal("0.3"))]


def test_of_very_many_tenants_the_busiest_are_shown_in_their_own_order() -> None:
    names = [f"t{index:04}" for index in range(1000)]
    lines = [sample.tenant(name, running=index % 250, tokens_per_s=float(index)) for index, name in enumerate(names)]
    group = board(sample.snapshot([sample.tier("standard", 1, 5000, lines)])).groups[0]
    busiest = {f"t{index:04}" for index in range(1000) if index % 250 >= 240}
    assert [row.line.tenant for row in group.tenants] == sorted(busiest)
    assert (len(busiest), group.quieter) == (SHOWN_TENANTS, 960)
    assert group.total is not None
    assert group.total.line.running == sum(index % 250 for index in range(1000))


def test_a_member_gets_its_own_lines_and_nothing_made_of_others() -> None:
    page = board(sample.snapshot(), scope=Scope(staff=False, tenants=frozenset({"beta"}), money=frozenset()))
    assert [group.tier.tier for group in page.groups] == ["standard"]
    assert page.groups[0].total is None
    assert [row.line.tenant for row in page.groups[0].tenants] == ["beta"]
    assert page.groups[0].tenants[0].line.money is None
    assert (page.summary, page.engines, page.events_lag_ms) == ({}, (), None)


@given(st.frozensets(st.sampled_from(["alpha", "beta", "gamma", "delta", "omega"])))
def test_no_scope_ever_shows_a_tenant_outside_it(tenants: frozenset[str]) -> None:
    page = board(sample.snapshot(), scope=Scope(staff=False, tenants=tenants))
    shown = {row.line.tenant for group in page.groups for row in group.tenants}
    assert shown == tenants - {"omega"}


@pytest.mark.parametrize(("age_s", "stale"), [(0.0, False), (3.0, False), (3.1, True), (4000.0, True)])
def test_old_figures_are_stale(age_s: float, stale: bool) -> None:
    page = board(sample.snapshot(), age_s=age_s)
    assert page.stale is stale
    assert any("Live data stopped" in notice for notice in page.notices) is stale


def test_a_silent_engine_is_not_ready_whatever_it_said_last() -> None:
    page = board(sample.snapshot(engines=[sample.engine(age_ms=2000)]), age_s=1.5)
    assert (page.engines[0].state, page.summary["ready"]) == ("silent", 0)
    assert page.notices[0].startswith("No engine is ready for smollm2-135m")


def test_a_stale_snapshot_says_nothing_about_engines() -> None:
    page = board(sample.snapshot(engines=[sample.engine(age_ms=100)]), age_s=30)
    assert page.engines[0].state == "ready"
    assert len(page.notices) == 1


def test_no_engine_at_all_is_said_to_members_too() -> None:
    page = board(sample.snapshot(engines=[]), scope=Scope(staff=False, tenants=frozenset({"alpha"})))
    assert page.notices == ("No engine is connected: requests can't be served.",)


@pytest.mark.parametrize(
    ("state", "missed"), [("ready", True), ("starting", True), ("draining", False), ("stopped", False)]
)
def test_an_engine_that_vanishes_is_missed_unless_it_left_on_purpose(state: str, missed: bool) -> None:
    history = History()
    at_ms = 1_800_000_000_000
    board(sample.snapshot(engines=[sample.engine(state=state, at_ms=at_ms, age_ms=0)], at_ms=at_ms), history=history)
    later = sample.snapshot(engines=[sample.engine("other", at_ms=at_ms + 20_000, age_ms=0)], at_ms=at_ms + 20_000)
    page = board(later, history=history)
    assert [row.state for row in page.engines] == (["ready", "silent"] if missed else ["ready"])
    much_later = sample.snapshot(engines=[sample.engine("other", at_ms=at_ms + 900_000)], at_ms=at_ms + 900_000)
    assert len(board(much_later, history=history).engines) == 1


def test_a_replaced_engine_is_forgotten_soon_and_a_missing_one_is_not() -> None:
    """Three engines; two die, and one of those is started again under new names, twice."""
    history = History()
    t0 = 1_800_000_000_000

    def page(after_s: int, *engines: tuple[str, int]) -> Board:
        now_ms = t0 + after_s * 1000
        beats = [sample.engine(name, at_ms=now_ms, started_ms=t0 + start * 1000, age_ms=0) for name, start in engines]
        return board(sample.snapshot(engines=beats, at_ms=now_ms), history=history)

    page(0, ("a", -9), ("b", -9), ("c", -9))
    page(5, ("a", -9), ("b2", 4))
    soon = page(20, ("a", -9), ("b3", 15))
    assert {row.line.engine: row.state for row in soon.engines} == {
        "a": "ready", "b3": "ready", "b": "silent", "b2": "silent", "c": "silent"
    }  # fmt: skip
    later = page(120, ("a", -9), ("b3", 15))
    assert [row.state for row in later.engines] == ["ready", "ready", "silent"]
    assert later.summary["engines"] == 3


def test_names_from_the_wire_are_escaped() -> None:
    tiers = [sample.tier("interactive", 0, 1000, [sample.tenant("alpha", name="<script>alert(1)</script>")])]
    html = render_to_string("console/board.html", {"board": board(sample.snapshot(tiers))})
    assert "&lt;script&gt;" in html
    assert "<script" not in html


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"at_ms": "x"}', b'{"at_ms": 1, "tiers": [{}]}'])
def test_what_is_no_snapshot_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read(text)


@pytest.mark.parametrize(
    ("value", "width", "kind"),
    [
        (None, "0.0", "good"),
        (500, "18.0", "good"),
        (1000, "36.0", "good"),
        (1001, "36.0", "over"),
        (9e9, "72.0", "over"),
    ],
)
def test_the_bar_ends_at_twice_the_target(value: float | None, width: str, kind: str) -> None:
    svg = target_bar(value, 1000)
    assert f'class="{kind}" x="0" y="2" width="{width}"' in svg
    assert target_bar(value, None) == ""


@given(st.floats(-1, 2), st.floats(-1, 2))
def test_the_meter_never_overflows(used: float, cached: float) -> None:
    shares = re.findall(r'class="(?:used|tight|cached)"[^/]*width="([\d.]+)"', meter(used, cached))
    widths = [float(share) for share in shares]
    assert len(widths) == 2
    assert sum(widths) <= 72.05


def test_a_gap_in_the_series_stays_a_gap() -> None:
    at = 1_800_000_000_000
    seconds = [(at + 1000 * s, 100.0) for s in range(60) if not 20 <= s < 30]
    assert sparkline(seconds, at + 59_000, 200).count("<polyline") == 2
    unknown = [(moment, None) for moment, _ in seconds]
    assert "<polyline" not in sparkline(unknown, at + 59_000, 200)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (figures.duration(0.0), "0 ms"),
        (figures.duration(0.9996), "1.00 s"),
        (figures.duration(9.996), "10.0 s"),
        (figures.duration(59.96), "1 min 00 s"),
        (figures.duration(3599.6), "1 h 00 min"),
        (figures.age(3.04), "3.0 s"),
        (figures.target(250), "250 ms"),
        (figures.target(2500), "2.5 s"),
        (figures.percent(1), "100 %"),
        (figures.percent(0.9999), "99.9 %"),
        (figures.percent(0), "0 %"),
        (figures.rate(0.04), "0.0"),
        (figures.rate(12345.6), "12,346"),
        (figures.amount("0"), "0.00"),
        (figures.amount("0.000000000000001"), "0.000000000000001"),
        (figures.amount("1234.5"), "1,234.50"),
        (figures.amount("-0.5"), "-0.500000"),
        (figures.amount("NaN?"), figures.UNKNOWN),
        (figures.clock(1_800_000_000_000), "08:00:00"),
    ],
)
def test_figures_are_written_so(written: str, expected: str) -> None:
    assert written == expected
