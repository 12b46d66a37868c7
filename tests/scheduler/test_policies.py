"""Order, fairness, floors, aging, relegation, early refusal; the cost model, forecasts, windows and buckets."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import POLICIES, SchedulerConfig, create
from engine.scheduler.contract import Accounts
from engine.scheduler.cost import Load, StepCost
from engine.scheduler.forecast import Outlook, OutputForecast
from engine.scheduler.step import Slice, StepOutcome, StepPlan
from engine.scheduler.window import buckets

from .machine import Bench, request


def bench(policy: str = "tiered", **config: object) -> Bench:
    values: dict[str, object] = {"block_size": 4, "device_blocks": 400, "max_rows": 4, "max_step_tokens": 64}
    values |= {"context_length": 400, "default_output": 8, "min_stay_s": 0.0}
    return Bench(create(policy, SchedulerConfig(**(values | config))))  # type: ignore[arg-type]


def test_unknown_policies_and_senseless_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="known are deadline, fair, fcfs, priority, tiered"):
        create("magic")
    for wrong in ({"max_rows": 0}, {"max_rows": 9, "max_step_tokens": 8}, {"floors": {1: 1.0}}, {"express_rows": 99}):
        with pytest.raises(ValueError):
            SchedulerConfig(**wrong)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=2, max_size=3),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=3, max_size=6),
    policy=st.sampled_from(["fair", "tiered"]),
)
def test_spread_of_service_between_backlogged_tenants_is_bounded(
    weights: list[float], lengths: list[tuple[int, int]], policy: str
) -> None:
    b = bench(policy, prefix_cache=False, gate_tokens=20.0, aging_every=10_000, preempt=False)
    config = b.scheduler.config
    number = 0
    for _ in range(12):
        for t, weight in enumerate(weights):
            prompt, new = lengths[number % len(lengths)]
            number += 1
            b.submit(request(number, prompt, new, tier=1, tenant=f"t{t}", weight=weight, ttft_deadline_s=1e9))
    longest, most = max(p for p, _ in lengths), max(p + n for p, n in lengths) * config.max_rows
    bound = 2 * max(config.w_in * longest, config.w_out * most) + config.gate_tokens
    while True:
        b.step()
        waiting = {s.tenant for s in b.scheduler.backlog}
        if len(waiting) < len(weights):
            break
        counters = [b.scheduler.book.counters.get((1, f"t{t}"), 0.0) for t in range(len(weights))]
        assert max(counters) - min(counters) <= bound / min(weights)
    b.drain()


def test_shares_follow_weights_while_all_are_backlogged() -> None:
    b = bench("fair", prefix_cache=False)
    for number in range(300):
        t = number % 3
        b.submit(request(number, 10, 10, tier=1, tenant=f"t{t}", weight=float(2**t)))
    for _ in range(250):
        b.step()
    served = [b.scheduler.book.counters[1, f"t{t}"] * 2**t for t in range(3)]
    assert [s / sum(served) for s in served] == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.03)


def test_a_tenant_back_from_idle_has_saved_up_nothing() -> None:
    b = bench("fair", max_rows=1, prefix_cache=False)
    for number in range(20):
        b.submit(request(number, 10, 5, tenant="busy"))
    for _ in range(40):
        b.step()
    b.submit(request(100, 10, 5, tenant="idle", arrival=b.now))
    counters = b.scheduler.book.counters
    assert counters[0, "idle"] == counters[0, "busy"]
    b.drain()


def test_cached_prompt_tokens_cost_less() -> None:
    b = bench("fair")
    prompt = tuple(range(44))
    b.submit(request(1, prompt, 1))
    b.drain()
    full = b.scheduler.book.counters[0, "a"]
    b.submit(request(2, prompt, 1))
    b.drain()
    assert b.scheduler.book.counters[0, "a"] - full == pytest.approx(full - 0.9 * 40)


def test_a_cancelled_prefill_is_refunded() -> None:
    b = bench("fair", max_step_tokens=16, adaptive_chunk=False)
    b.submit(request(1, 100, 5))
    b.step()
    assert b.scheduler.book.counters[0, "a"] == 100.0
    b.scheduler.end(1, b.now)
    b.step()
    assert b.scheduler.book.counters[0, "a"] == 16.0


def test_a_floor_gets_its_share_and_no_more_under_a_flood_of_a_better_tier() -> None:
    floors = {"floors": {2: 0.2}, "floor_quantum": 60.0, "deficit_cap": 400.0}
    b = bench(max_rows=1, prefix_cache=False, **floors)
    number = 0
    for _ in range(150):
        for tier in (0, 2):
            number += 1
            b.submit(request(number, 10, 10, tier=tier, tenant="ab"[tier // 2]))
    for _ in range(900):
        b.step()
    served = [b.scheduler.book.counters[tier, name] for tier, name in ((0, "a"), (2, "b"))]
    assert served[1] / sum(served) == pytest.approx(0.2, abs=0.04)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 4),
    every=st.integers(1, 6),
    crowd=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8), st.floats(0.0, 2.0)), min_size=5, max_size=40),
)
def test_starvation_bound_in_admissions_of_the_tier(rows: int, every: int, crowd: list[tuple[int, int, float]]) -> None:
    """The docstring of `Tiered`: admitted by the (n + 1)(K + R)-th admission of its tier after its arrival."""
    b = bench(max_rows=rows, aging_every=every, preempt=False, patience_s=0.0)
    order: list[int] = []
    for number, (prompt, new, deadline) in enumerate(crowd):
        b.submit(request(number, prompt, new, tier=1, tenant="abc"[number % 3], ttft_deadline_s=deadline))
    while not b.scheduler.idle:
        order += [start.sequence for start in b.step().starts]
    for place, number in enumerate(order):
        assert place + 1 <= (number + 1) * (every + rows)


def test_late_requests_stand_behind_those_that_can_still_make_it() -> None:
    b = bench("deadline", max_rows=1, preempt=False)
    b.submit(request(0, 10, 20, ttft_deadline_s=5.0))
    b.step()
    b.submit(request(1, 10, 2, ttft_deadline_s=0.1))
    b.submit(request(2, 10, 2, ttft_deadline_s=3.0, tpot_s=0.001))
    b.drain()
    assert b.first[2] < b.first[1]


def test_early_refusal_of_sheddable_tiers_only() -> None:
    b = bench(max_rows=2)
    for number in range(400):
        b.submit(request(number, 50, 50, tier=0, ttft_deadline_s=1e9))
    assert b.scheduler.refuses(request(999, tier=2, ttft_deadline_s=1.0), 0.0)
    assert not b.scheduler.refuses(request(999, tier=2, ttft_deadline_s=1e6), 0.0)
    assert not b.scheduler.refuses(request(999, tier=0, ttft_deadline_s=1.0), 0.0)
    assert not bench().scheduler.refuses(request(999, tier=2, ttft_deadline_s=1.0), 0.0)


def test_accounts_of_the_queue_replace_ours_but_for_what_it_was_not_told() -> None:
    b = bench()
    b.submit(request(1, 10, 30))
    told = Accounts({1: 7.0}, {(0, "a"): 500.0})
    for _ in range(3):
        plan = b.scheduler.plan(b.now, told)
        b.scheduler.commit(plan, b.machine.execute(plan), b.now)
    assert b.scheduler.book.counters[0, "a"] == 506.0
    assert b.scheduler.take_charges() == ((0, "a", 6.0),)
    b.scheduler.plan(b.now, told)
    assert b.scheduler.book.counters[0, "a"] == 506.0, "an old view changes nothing"
    b.scheduler.plan(b.now, Accounts({1: 7.0}, {(0, "a"): 510.0}))
    assert b.scheduler.book.counters[0, "a"] == 510.0


# Cost model ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.tuples(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-3), st.floats(1e-5, 2e-3), st.floats(0.0, 1e-6)),
    st.lists(st.tuples(st.integers(0, 512), st.integers(0, 64), st.integers(0, 2000)), min_size=40, max_size=120),
)
def test_the_fit_predicts_steps_like_those_it_saw(
    truth: tuple[float, float, float, float], seen: list[tuple[int, int, int]]
) -> None:
    real, fitted = StepCost(*truth), StepCost()
    loads = [Load(p, r, r * context + p * p / 2) for p, r, context in seen]
    for load in loads * 4:
        fitted.observe(load, real.seconds(load))
    errors = [abs(fitted.seconds(load) / real.seconds(load) - 1.0) for load in loads]
    assert sum(errors) / len(errors) < 0.1


@settings(max_examples=200, derandomize=True)
@given(st.floats(1e-4, 2.0), st.integers(0, 8000), st.floats(0.0, 1e-5))
def test_the_inverse_is_the_largest_prefill_that_fits(spare_s: float, start: int, attention: float) -> None:
    cost = StepCost(0.01, 6e-4, 1e-3, attention)
    most = cost.largest_prefill(spare_s, start)
    assert cost.prefill_seconds(most, start) <= spare_s * (1 + 1e-9)
    assert cost.prefill_seconds(most + 1, start) > spare_s * (1 - 1e-9)
    assert cost.largest_prefill(-spare_s, start) == 0


@pytest.mark.parametrize(
    ("deadline", "light", "company_s", "least", "most"),
    [
        (2.5, False, 1.0, 0.09, 0.1),
        (100.0, True, 1.0, 0.06, 0.0667),
        (100.0, False, 1.0, 0.03, 0.04),
        (100.0, False, 61.0, 0.06, 0.0667),
        (100.0, False, inf, 0.06, 0.0667),
    ],
)
def test_chunks_keep_running_streams_within_their_tpot(
    deadline: float, light: bool, company_s: float, least: float, most: float
) -> None:
    """A prompt that is in a hurry gets all of the time, one with a second to spare two thirds of the step, and less if
    its tenant is heavy and somebody else asked within a minute."""
    b = bench("tiered", max_step_tokens=4096, max_rows=8, device_blocks=2000, context_length=4000)
    cost = b.scheduler.cost = StepCost(0.01, 1e-3, 1e-3, 0.0)
    if company_s < inf:
        b.submit(request(3, 8, 1, tenant="other"))
        b.drain()
        b.now += company_s
    b.submit(request(1, 8, 40, tpot_s=0.1))
    b.step()
    b.submit(request(2, 2000, 4, ttft_deadline_s=b.now + deadline, light=light))
    for _ in range(10):
        plan = b.scheduler.plan(b.now)
        samples = b.machine.execute(plan).samples
        seconds = cost.seconds(Load.of(plan.slices))
        assert least < seconds <= most
        b.now += seconds
        b.take(b.scheduler.commit(plan, StepOutcome(plan.step, samples, seconds), b.now))
    b.drain()


def test_a_tenant_with_few_rows_goes_first_and_borrows_what_the_streams_of_a_flood_are_ahead() -> None:
    b = bench("tiered", max_step_tokens=4096, max_rows=8, device_blocks=2000, context_length=4000)
    cost = b.scheduler.cost = StepCost(0.01, 1e-3, 1e-3, 0.0)

    def step() -> tuple[float, dict[int, int]]:
        plan = b.scheduler.plan(b.now)
        samples, seconds = b.machine.execute(plan).samples, cost.seconds(Load.of(plan.slices))
        b.now += seconds
        b.take(b.scheduler.commit(plan, StepOutcome(plan.step, samples, seconds), b.now))
        return seconds, {piece.sequence: piece.length for piece in plan.slices if piece.length > 1}

    for number in range(1, 5):
        b.submit(request(number, 8, 200, tenant="flood", tpot_s=0.1))
    for _ in range(20):
        step()
    b.submit(request(5, 200, 4, tenant="flood", tpot_s=0.1, ttft_deadline_s=b.now + 0.5))
    seconds, prefill = step()
    assert list(prefill) == [5] and 0.09 < seconds <= 0.1
    b.submit(request(6, 200, 4, tenant="quiet", tpot_s=0.1, ttft_deadline_s=b.now + 0.5, light=True))
    seconds, prefill = step()
    assert list(prefill) == [6], "before the prompt of the flood that was begun"
    assert 0.14 < seconds <= 0.15
    b.drain()


def flooded(steps: int, streams: int = 4, **config: object) -> Bench:
    """Streams of a flood that are due every 0.1 s and have had so many steps of 0.02 s."""
    b = bench(max_step_tokens=4096, device_blocks=2000, context_length=4000, **config)
    for number in range(1, streams + 1):
        b.submit(request(number, 8, 200, tenant="flood", tpot_s=0.1))
    for _ in range(steps):
        b.step()
    b.scheduler.cost = StepCost(0.01, 1e-3, 5e-3, 0.0)  # not what it has learnt of these
    return b


def quiet(b: Bench, number: int, prompt: int) -> None:
    b.submit(request(number, prompt, 4, tenant="quiet", tpot_s=0.1, ttft_deadline_s=b.now + 0.5, light=True))


def computed(plan: StepPlan) -> dict[int, int]:
    return {piece.sequence: piece.length for piece in plan.slices}


def test_streams_that_are_ahead_make_way_for_prompts_of_a_light_tenant_one_to_a_step() -> None:
    b = flooded(20, max_rows=8)
    for number in (5, 6):
        quiet(b, number, 60)
    assert computed(b.step()) == {5: 60}
    assert computed(b.step()) == {5: 1, 6: 60}
    assert computed(b.step()) == dict.fromkeys(range(1, 7), 1)
    b.drain()


def test_short_prompts_share_a_step_as_long_as_that_costs_less_than_one_of_their_own() -> None:
    b = flooded(20, streams=8, max_rows=16)
    for number in range(10, 15):
        quiet(b, number, 4)
    assert computed(b.step()) == {10: 4, 11: 4, 12: 4}, "10 ms for a step and 4 for each: the third is the one too many"
    b.drain()


def test_streams_that_hardly_lengthen_a_step_keep_their_rows() -> None:
    b = flooded(20, max_rows=8)
    b.scheduler.cost = StepCost(0.01, 1e-3, 1e-3, 0.0)
    quiet(b, 5, 60)
    assert computed(b.step()) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 60}
    b.drain()


def test_streams_that_are_not_ahead_keep_their_rows() -> None:
    b = flooded(1, max_rows=8)
    quiet(b, 5, 60)
    assert computed(b.step()) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 60}
    b.drain()


def test_streams_go_on_when_the_prompt_that_they_made_way_for_finds_no_room() -> None:
    b = flooded(20, max_rows=4, preempt=False)
    quiet(b, 5, 60)
    assert computed(b.step()) == dict.fromkeys(range(1, 5), 1)
    b.drain()


def test_a_light_tenant_takes_rows_of_the_one_that_has_most_until_both_have_as_many() -> None:
    b = bench(max_rows=6, host_blocks=64, block_bytes=1000)
    for number, tenant in enumerate(("other", *["flood"] * 5)):
        b.submit(request(number, 8, 30, tenant=tenant))
    b.step()
    assert b.scheduler.room(b.now)[0].light_slots == 2
    b.submit(request(10, 8, 30, tenant="flood"))
    assert not b.step().parks
    for number in (11, 12, 13):
        b.submit(request(number, 8, 4, tenant="quiet", light=True))
    plan = b.step()
    assert [park.sequence for park in plan.parks] == [5, 4], "the latest first"
    assert [start.sequence for start in plan.starts] == [11, 12]
    b.drain()
    b.verify()


def test_who_costs_more_to_bring_back_than_the_newcomer_computes_keeps_its_row() -> None:
    for prompt, parks in ((40, 1), (10, 0)):
        b = bench(max_rows=3)
        for number in range(3):
            b.submit(request(number, 30, 30, tenant="flood"))
        b.step()
        b.step()
        b.submit(request(9, prompt, 4, tenant="quiet", light=True))
        assert len(b.step().parks) == parks
        b.drain()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(4, 12), st.integers(0, 2)), max_size=40),
)
def test_no_two_of_a_tier_evict_each_other_in_turn(rows: int, crowd: list[tuple[str, bool, int, int]]) -> None:
    """Each eviction among equals is for a light one that is new: at most as many as there are such."""
    b = bench(max_rows=rows, host_blocks=200, block_bytes=1)
    newcomers: dict[int, bool] = {}

    def step() -> None:
        held = [s.tenant for s in b.scheduler.running.values()]
        plan = b.step()
        started = [start.sequence for start in plan.starts]
        fresh = [n for n in started if newcomers.pop(n, False)]
        assert len(plan.parks) <= len(fresh)
        held += [b.requests[n].tenant for n in started]
        assert all(held.count(b.requests[park.sequence].tenant) > 1 for park in plan.parks)

    for number, (tenant, light, new, steps) in enumerate(crowd):
        newcomers[number] = light
        b.submit(request(number, 8, new, tenant=tenant, light=light, ttft_deadline_s=1e9))
        for _ in range(steps):
            step()
    while not b.scheduler.idle:
        step()
    b.verify()


def test_without_a_tpot_target_or_where_it_cannot_be_kept_prefill_goes_on() -> None:
    for tpot, least in ((0.0, 500), (0.001, 16)):
        b = bench("tiered", max_step_tokens=512, max_rows=8, device_blocks=2000, context_length=4000)
        b.submit(request(1, 8, 40, tpot_s=tpot))
        b.step()
        b.submit(request(2, 2000, 4, ttft_deadline_s=100.0))
        assert [s.length >= least for s in b.step().slices if s.sequence == 2] == [True]
        b.drain()


def test_loads_count_what_attention_looks_at() -> None:
    load = Load.of([Slice(1, 100, 1, True), Slice(2, 0, 10, False), Slice(3, 10, 10, True)])
    assert load == Load(20, 1, 100 + 50 + 150)


# Forecasts -------------------------------------------------------------------------------------------------------


def test_forecasts_follow_what_a_tier_made_lately() -> None:
    forecast = OutputForecast(256)
    assert forecast.remaining(0, 0, 1000) == 256
    assert forecast.remaining(0, 0, 100) == 100
    for length in range(10, 110):
        forecast.observe(0, length)
    assert forecast.remaining(0, 0, 1000) == pytest.approx(70, abs=2)
    assert forecast.remaining(0, 100, 1000) < 10
    assert forecast.remaining(0, 500, 1000) > 0
    assert forecast.remaining(1, 0, 1000) == 256


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=8), st.integers(0, 50), st.integers(1, 50))
def test_the_peak_is_what_step_by_step_counting_finds(
    members: list[tuple[int, int]], remaining: int, held: int
) -> None:
    everyone = [*members, (remaining, held)]
    peak = 0
    for t in range(max(r for r, _ in everyone) + 1):
        peak = max(peak, sum(h + t for r, h in everyone if r >= t))
    assert Outlook(members, 0, peak).fits(remaining, held)
    assert not Outlook(members, 0, peak - 1).fits(remaining, held)


# One-shot work ---------------------------------------------------------------------------------------------------


def embedding(number: int, length: int, arrival: float = 0.0, deadline: float = 1e9) -> object:
    return request(number, length, 0, arrival=arrival, ttft_deadline_s=deadline)


def test_the_window_closes_by_count_time_deadline_or_when_no_company_is_coming() -> None:
    def first_plan(now: float, count: int = 1, **config: object) -> int:
        b = bench(**({"window_s": 1.0, "window_count": 4, "adaptive_window": False} | config))
        for number in range(count):
            b.submit(embedding(number, 10, deadline=float(config.get("deadline", 1e9))))  # type: ignore[arg-type]
        return len(b.scheduler.plan(now).slices)

    assert first_plan(0.5) == 0
    assert first_plan(1.0) == 1
    assert first_plan(0.5, count=4) == 4


def test_the_window_opens_for_the_nearest_deadline() -> None:
    b = bench(window_s=10.0, window_count=8, adaptive_window=False)
    b.submit(embedding(1, 10, deadline=1.0))  # type: ignore[arg-type]
    assert not b.scheduler.plan(0.5).slices
    assert b.scheduler.plan(0.98).slices


def test_an_adaptive_window_does_not_wait_for_company_that_is_not_coming() -> None:
    for gap, waits in ((0.05, True), (5.0, False)):
        b = bench(window_s=1.0, window_count=64)
        for number in range(4):
            b.now = number * gap
            b.submit(embedding(number, 10, b.now))  # type: ignore[arg-type]
        assert (not b.scheduler.plan(b.now).slices) is (waits and b.now < 1.0)


def test_lengths_are_split_where_padding_is_dear_and_merged_where_few_wait() -> None:
    mixed = [10] * 8 + [400] * 8
    made = buckets(mixed, 512, 4)
    assert len(made) == 2
    assert all(sum(length in bucket for bucket in made) == 1 for length in range(1, 513))
    assert len(buckets(mixed, 512, 9)) == 1
    assert len(buckets([10] * 16, 512, 4)) == 1
    b = bench(padded=True, window_count=4, max_rows=8, max_step_tokens=4000)
    for number, length in enumerate(mixed[4:12]):
        b.submit(embedding(number, length))  # type: ignore[arg-type]
    assert {s.length for s in b.step().slices} == {400}, "long ones have less slack"
    assert {s.length for s in b.step().slices} == {10}


def test_every_policy_has_a_total_order_that_ends_with_the_arrival() -> None:
    for name in sorted(POLICIES):
        b = bench(name, max_rows=3, preempt=False)
        for number, tenant in ((1, "z"), (3, "a"), (5, "m"), (7, "b")):
            b.submit(request(number, 10, 3, tenant=tenant))
        assert [s.sequence for s in b.step().starts] == [1, 3, 5]
        b.drain()
