"""Faults that users of other servers paid for, one test each: the behaviour that is right."""

from __future__ import annotations

import inspect

import pytest

from engine.scheduler import SchedulerConfig, create
from engine.scheduler.contract import Accounts
from engine.scheduler.policies import base, order
from engine.scheduler.step import StepPlan

from .machine import Bench, request


def bench(policy: str = "tiered", **config: object) -> Bench:
    values: dict[str, object] = {"block_size": 4, "device_blocks": 64, "host_blocks": 64, "max_rows": 4}
    values |= {"max_step_tokens": 32, "context_length": 250, "block_bytes": 1000, "default_output": 8}
    values |= {"min_stay_s": 0.0, "swap_bytes_per_s": 1e12}
    return Bench(create(policy, SchedulerConfig(**(values | config))))  # type: ignore[arg-type]


def parks(b: Bench) -> list[int]:
    return [park.sequence for plan in b.plans for park in plan.parks]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline", "tiered"])
def test_two_of_equal_class_never_evict_each_other_in_turn(policy: str) -> None:
    b = bench(policy, max_rows=1, device_blocks=20)
    for number in range(6):
        b.submit(request(number, prompt=20, max_new=40, tenant="ab"[number % 2], ttft_deadline_s=1.0 + number / 10))
        b.step()
    b.drain()
    evictions = parks(b)
    assert len(evictions) == len(set(evictions)) <= 3, "one sequence had to go more than once for its equals"
    b.verify()


@pytest.mark.parametrize("link", [1.0, 1e12])
def test_a_parked_request_resumes_before_newcomers_of_its_class_and_is_computed_once_more_at_most(link: float) -> None:
    b = bench(max_rows=2, swap_bytes_per_s=link)
    b.submit(request(1, tier=1, max_new=30))
    b.submit(request(2, tier=1, max_new=30))
    for _ in range(6):
        b.step()
    b.submit(request(3, tier=0, max_new=4, arrival=b.now))
    b.submit(request(4, tier=1, max_new=4, arrival=b.now, ttft_deadline_s=b.now + 0.1))
    while not parks(b):
        b.step()
    victim = parks(b)[0]
    b.drain()
    returns = [{r.sequence for r in (*p.restores, *p.starts)} for p in b.plans]
    back = next(i for i, sequences in enumerate(returns) if victim in sequences and i > 6)
    newcomer = next(i for i, p in enumerate(b.plans) if any(s.sequence == 4 for s in p.starts))
    assert back <= newcomer
    assert len(parks(b)) == len(set(parks(b)))
    b.verify()


def test_a_head_that_does_not_fit_strands_nobody_and_is_not_starved_by_smaller_ones() -> None:
    b = bench(device_blocks=16, patience_s=0.2, max_rows=4)
    b.submit(request(1, prompt=30, max_new=8))
    b.step()
    b.submit(request(2, prompt=50, max_new=8, arrival=b.now))
    for number in range(3, 23):
        b.submit(request(number, prompt=8, max_new=8, arrival=b.now))
    b.drain()
    assert b.first[3] < b.first[2], "small ones may pass while the large one waits for room"
    assert b.first[2] < b.first[22], "but not for ever"
    b.verify()


def test_if_nothing_runs_and_work_waits_something_is_admitted() -> None:
    b = bench(device_blocks=10, default_output=10_000)
    b.submit(request(1, prompt=35, max_new=200))
    assert b.step().slices
    b.drain()
    b.verify()


def test_a_prompt_takes_its_blocks_piece_by_piece_and_nobody_else_gets_the_rest() -> None:
    b = bench("priority", device_blocks=20, max_step_tokens=16, preempt=False, forecast_output=False)
    b.submit(request(1, prompt=60, max_new=1, tier=2))
    assert [len(start.blocks) for start in b.step().starts] == [4]
    b.submit(request(2, prompt=40, max_new=1, tier=0, arrival=b.now))
    plans = [b.step() for _ in range(3)]
    assert [len(extend.blocks) for plan in plans for extend in plan.extends] == [4, 4, 3]
    assert not any(plan.starts for plan in plans), "16 blocks are free, but 11 of them promised"
    b.drain()
    assert not parks(b), "nothing that was begun had to be thrown out"
    b.verify()


def test_blocks_that_a_copy_still_reads_are_neither_counted_nor_given_away() -> None:
    b = bench(device_blocks=16, max_rows=4, forecast_output=False)
    b.submit(request(1, prompt=40, max_new=20, tier=2))
    for _ in range(4):
        b.step()
    b.submit(request(2, prompt=40, max_new=4, tier=0, arrival=b.now))
    plan = b.step()
    assert [park.sequence for park in plan.parks] == [1] and plan.parks[0].host
    assert not plan.starts, "the copy out has to be done first"
    assert b.step().starts, "and is done with the commit"
    b.drain()
    b.verify()


def test_blocks_given_up_by_recompute_can_be_used_at_once() -> None:
    b = bench(device_blocks=16, host_blocks=0, forecast_output=False)
    b.submit(request(1, prompt=40, max_new=20, tier=2))
    for _ in range(4):
        b.step()
    b.submit(request(2, prompt=40, max_new=4, tier=0, arrival=b.now))
    plan = b.step()
    assert [park.host for park in plan.parks] == [()]
    assert [start.sequence for start in plan.starts] == [2]
    b.drain()
    b.verify()


def test_what_the_scheduler_keeps_of_a_parked_sequence_brings_it_back_where_it_was() -> None:
    b = bench(max_rows=1)
    b.submit(request(1, tier=2, max_new=20))
    for _ in range(5):
        b.step()
    b.submit(request(2, tier=0, max_new=3, arrival=b.now))
    b.drain()
    restore = next(r for p in b.plans for r in p.restores)
    park = next(p for plan in b.plans for p in plan.parks)
    assert (restore.host, restore.computed) == (park.host, park.computed)
    assert len(b.output[1]) == 20
    b.verify()


def test_a_flood_of_cheap_prompts_does_not_push_out_a_dear_tenants_prefix() -> None:
    b = bench(device_blocks=40)
    dear = tuple(range(500, 540))
    b.submit(request(1, prompt=dear, max_new=1, tier=0, tenant="dear"))
    b.drain()
    for number in range(2, 30):
        b.submit(request(number, prompt=40, max_new=1, tier=2, tenant="cheap"))
    b.drain()
    b.submit(request(99, prompt=dear, max_new=1, tier=0, tenant="dear", arrival=b.now))
    assert b.step().starts[0].cached == 36
    b.drain()


def test_the_clock_is_an_argument_and_aging_never_rewrites_the_class() -> None:
    for module in (base, order):
        assert "time" not in vars(module), "a comparison could read a clock"
    assert list(inspect.signature(create("tiered").plan).parameters) == ["now", "accounts"]
    b = bench(max_rows=1, aging_every=2)
    b.submit(request(1, tier=2, max_new=2))
    b.now = 1000.0
    b.submit(request(2, tier=0, max_new=2, arrival=b.now))
    assert [s.sequence for s in b.step().starts] == [2], "an old batch request is still a batch request"
    b.drain()


def test_a_cold_prompt_is_not_starved_by_warm_ones() -> None:
    b = bench(max_rows=1, device_blocks=60, aging_every=4, preempt=False)
    warm = tuple(range(40))
    b.submit(request(0, prompt=warm, max_new=1))
    b.drain()
    b.submit(request(1, prompt=tuple(range(600, 640)), max_new=1, arrival=b.now))
    for number in range(2, 30):
        b.submit(request(number, prompt=warm, max_new=1, arrival=b.now))
    b.drain()
    rank = sorted(b.first, key=b.first.__getitem__).index(1)
    assert rank <= 1 + 4 + 1 + 1, "at most K + R admissions of its tier pass it"


def test_the_price_of_preemption_is_in_the_admission_decision() -> None:
    def wasted(forecast: bool) -> int:
        b = bench(device_blocks=40, max_rows=8, forecast_output=forecast, host_blocks=0, default_output=60)
        for number in range(12):
            b.submit(request(number, prompt=16, max_new=60))
        b.drain()
        b.verify()
        return b.machine.tokens_computed - 12 * (16 + 59)

    assert wasted(True) == 0
    assert wasted(False) > 0


def test_a_better_tier_evicts_a_running_worse_one_when_all_slots_are_taken() -> None:
    b = bench(max_rows=4)
    for number in range(4):
        b.submit(request(number, tier=2, max_new=100))
    for _ in range(4):
        b.step()
    b.submit(request(9, tier=0, max_new=4, arrival=b.now))
    plan = b.step()
    assert len(plan.parks) == 1
    assert [start.sequence for start in plan.starts] == [9]
    b.drain()
    b.verify()


def test_a_newly_started_one_stays_for_the_minimum() -> None:
    b = bench(max_rows=1, min_stay_s=0.2)
    b.submit(request(1, tier=2, max_new=100))
    b.step()
    b.submit(request(2, tier=0, max_new=2, arrival=b.now))
    while not parks(b):
        b.step()
    assert b.now >= 0.2
    b.drain()


def test_floor_admitted_work_is_protected_until_its_deficit_is_spent() -> None:
    b = bench(max_rows=1)
    b.submit(request(1, tier=2, max_new=30, by_floor=True))
    accounts = Accounts({2: 45.0}, {})

    def step() -> StepPlan:
        plan = b.scheduler.plan(b.now, accounts)
        outcome = b.machine.execute(plan)
        b.now += outcome.seconds
        b.take(b.scheduler.commit(plan, outcome, b.now))
        return plan

    step()
    b.submit(request(2, tier=0, max_new=2, arrival=b.now))
    survived = 0
    while not step().parks:
        survived += 1
    assert 18 <= survived <= 26, "45 weighted tokens are 22 output tokens"
    b.drain()
    b.verify()


def test_a_prefilling_sequence_that_was_evicted_in_a_plan_is_not_in_it() -> None:
    b = bench(max_rows=1, device_blocks=64, max_step_tokens=16)
    b.submit(request(1, prompt=100, max_new=5, tier=2))
    b.step()
    b.submit(request(2, prompt=8, max_new=2, tier=0, arrival=b.now))
    plan = b.step()
    assert [s.sequence for s in plan.slices] == [2]
    b.drain()
    b.verify()
