"""The scheduler through its front door: submit, plan, execute on the checking machine, commit."""

from __future__ import annotations

import msgspec
import pytest

from engine.scheduler import SchedulerConfig, create
from engine.scheduler.step import StepOutcome, StepPlan

from .machine import Bench, following, request, told


def bench(policy: str = "tiered", **config: object) -> Bench:
    values: dict[str, object] = {"block_size": 4, "device_blocks": 64, "host_blocks": 32, "max_rows": 4}
    values |= {"max_step_tokens": 32, "context_length": 200, "block_bytes": 1000, "default_output": 8}
    return Bench(create(policy, SchedulerConfig(**(values | config))))  # type: ignore[arg-type]


def test_one_sequence_says_what_the_model_says() -> None:
    b = bench()
    b.submit(request(1, prompt=50, max_new=7))
    b.drain()
    assert b.output[1] == told(b.requests[1].prompt, 7)
    assert b.finish[1] == "length"
    assert [s.length for p in b.plans for s in p.slices] == [32, 18, 1, 1, 1, 1, 1, 1]


def test_plans_and_outcomes_are_json_and_come_back_equal() -> None:
    b = bench()
    b.submit(request(1))
    plan = b.scheduler.plan(0.0)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=StepPlan) == plan
    outcome = b.machine.execute(plan)
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=StepOutcome) == outcome


def test_an_uncommitted_plan_changes_nothing() -> None:
    b = bench()
    for number in range(6):
        b.submit(request(number, tier=number % 3))
    first = b.scheduler.plan(0.0)
    b.scheduler.check()
    assert b.scheduler.plan(0.0) == first
    b.drain()
    b.verify()


def test_the_end_token_ends_and_is_not_output() -> None:
    b = bench()
    prompt = request(1).prompt
    said = told(prompt, 5)
    b.submit(request(1, prompt=prompt, ends=frozenset({said[3]})))
    b.submit(request(2, prompt=prompt, ends=frozenset({said[3]}), min_new=5))
    b.drain()
    assert (b.output[1], b.finish[1]) == (said[:3], "stop")
    assert b.output[2][:5] == said


def test_rows_are_continuous_batching_short_ones_make_place() -> None:
    b = bench(max_rows=2)
    b.submit(request(1, max_new=30))
    b.submit(request(2, max_new=2))
    b.submit(request(3, max_new=2))
    b.drain()
    assert b.first[3] < 10 * 0.02
    b.verify()


def test_better_tier_first_then_arrival() -> None:
    b = bench(max_rows=1, preempt=False)
    for number, tier in ((1, 2), (2, 1), (3, 0), (4, 0)):
        b.submit(request(number, tier=tier, max_new=2))
    b.drain()
    assert sorted(b.first, key=b.first.__getitem__) == [3, 4, 2, 1]


def test_ended_between_plan_and_commit_is_safe() -> None:
    b = bench()
    b.submit(request(1))
    b.submit(request(2))
    b.step()
    plan = b.scheduler.plan(b.now)
    b.scheduler.end(1, b.now)
    b.submit(request(3))
    live = b.scheduler.device.live
    advances = b.scheduler.commit(plan, b.machine.execute(plan), b.now)
    assert [a.sequence for a in advances] == [2]
    assert b.scheduler.device.live < live
    assert b.scheduler.plan(b.now).drops[0].sequence == 1
    b.take(advances)
    b.drain()
    assert 1 not in b.finish
    b.verify()


def test_ending_a_sequence_that_this_plan_starts() -> None:
    b = bench()
    b.submit(request(1))
    plan = b.scheduler.plan(0.0)
    b.scheduler.end(1, 0.0)
    b.scheduler.commit(plan, b.machine.execute(plan), 0.02)
    b.scheduler.check()
    assert b.scheduler.device.live == 0


def test_ending_queued_parked_unknown_and_twice() -> None:
    b = bench(max_rows=1)
    b.submit(request(1))
    b.submit(request(2))
    b.step()
    b.scheduler.end(2, b.now)
    b.scheduler.end(2, b.now)
    b.scheduler.end(99, b.now)
    b.scheduler.check()
    b.drain()
    assert 2 not in b.finish


def test_a_fault_ends_one_sequence_alone() -> None:
    b = bench(max_step_tokens=64)
    b.submit(request(1))
    b.submit(request(2))
    plan = b.scheduler.plan(b.now)
    outcome = b.machine.execute(plan)
    faulty = StepOutcome(plan.step, outcome.samples, outcome.seconds, faults=((1, "nan"),))
    advances = b.scheduler.commit(plan, faulty, b.now)
    assert [(a.sequence, a.finish, a.reason) for a in advances] == [(1, "error", "nan"), (2, None, "")]
    b.take(advances)
    b.drain()
    b.verify()


def test_prefix_cache_serves_whole_blocks_of_the_same_salt_only() -> None:
    b = bench()
    prompt = tuple(range(40))
    b.submit(request(1, prompt=prompt, max_new=2))
    b.drain()
    b.submit(request(2, prompt=prompt, max_new=2))
    b.submit(request(3, prompt=prompt, max_new=2, tenant="b"))
    plan = b.step()
    assert {start.sequence: start.cached for start in plan.starts} == {2: 36, 3: 0}
    b.drain()
    b.verify()


def test_siblings_share_the_prompt_and_copy_on_write() -> None:
    b = bench(device_blocks=20)
    prompt = tuple(range(42))
    for number in (1, 2, 3):
        b.submit(request(number, prompt=prompt, group=1, max_new=6))
    b.step()
    b.step()
    plan = b.step()
    assert [c.sequence for c in plan.copies] == [2, 3]
    assert b.scheduler.device.live < 2 * 11
    b.drain()
    b.verify()
    assert b.machine.tokens_computed == 42 + 2 + 3 * 5


def test_a_swap_brings_every_token_back() -> None:
    b = bench(max_rows=1, swap_bytes_per_s=1e12, min_stay_s=0.0)
    b.submit(request(1, tier=2, max_new=20))
    for _ in range(5):
        b.step()
    b.submit(request(2, tier=0, max_new=4, arrival=b.now))
    b.drain()
    assert b.first[2] < b.now
    assert [p.computed for plan in b.plans for p in plan.parks] == [24]
    assert sum(len(plan.restores) for plan in b.plans) == 1
    assert b.machine.tokens_computed == 20 + 19 + 20 + 3
    b.verify()


def test_recompute_when_the_link_is_slow() -> None:
    b = bench(max_rows=1, swap_bytes_per_s=1.0, min_stay_s=0.0)
    b.submit(request(1, tier=2, max_new=20))
    for _ in range(5):
        b.step()
    b.submit(request(2, tier=0, max_new=4, arrival=b.now))
    b.drain()
    assert [p.host for plan in b.plans for p in plan.parks] == [()]
    b.verify()


def test_refuses_what_can_never_fit() -> None:
    b = bench(device_blocks=8)
    with pytest.raises(ValueError, match="does not fit"):
        b.submit(request(1, prompt=32))
    with pytest.raises(ValueError, match="empty"):
        b.submit(request(1, prompt=0))
    b.submit(request(1, prompt=31, max_new=50))
    b.drain()
    assert (len(b.output[1]), b.finish[1]) == (1, "length")


def test_one_shot_work_is_one_slice_that_ends_it() -> None:
    b = bench()
    b.submit(request(1, prompt=12, max_new=0))
    b.submit(request(2, prompt=0, max_new=0, cost_tokens=25))
    b.submit(request(3, prompt=60, max_new=0))
    b.drain()
    assert b.finish == {1: "stop", 2: "stop", 3: "stop"}
    assert sorted(s.length for p in b.plans for s in p.slices) == [12, 25, 60]


def test_memory_pressure_never_changes_the_text_nor_stalls() -> None:
    b = bench(device_blocks=16, max_rows=4, forecast_output=False)
    for number in range(8):
        b.submit(request(number, prompt=12, max_new=30, tier=number % 3))
    b.drain()
    assert sum(len(p.parks) for p in b.plans) > 0
    assert all(len(b.output[n]) == 30 for n in range(8))
    b.verify()


def test_the_outcome_must_belong_to_the_plan() -> None:
    b = bench()
    b.submit(request(1))
    plan = b.scheduler.plan(0.0)
    with pytest.raises(ValueError, match="step"):
        b.scheduler.commit(plan, StepOutcome(5), 0.0)


def test_room_tells_the_rows_that_may_be_kept() -> None:
    b = bench(max_rows=16)
    room = b.scheduler.room(0.0)[1]
    assert (room.slots, room.express_slots) == (12, 4)


def test_room_counts_free_rows_and_what_a_tier_could_evict() -> None:
    b = bench(max_rows=2)
    assert b.scheduler.room(0.0)[0].slots == 2
    b.submit(request(1, tier=2))
    b.submit(request(2, tier=1))
    b.step()
    room = b.scheduler.room(b.now)
    assert [(room[t].slots, room[t].evictable_slots) for t in (0, 1, 2)] == [(0, 2), (0, 1), (0, 0)]
    assert following([1]) != following([2])
