"""The fair queue through the functions on a real server: gate, weights, floors, lift, express rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.fair import GATE, LEAD, QUANTUM, UNIT, FairQueue
from engine.protocol.functions import Admission

from .conftest import ClockedFunctions
from .test_functions import final

RANKS = {"interactive": 0, "standard": 1, "batch": 2}


class Pool:
    """One pool with one engine; requests are named by their tenant."""

    def __init__(self, functions: ClockedFunctions) -> None:
        self.functions, self.count = functions, 0
        functions.register("m", "e", "h", b"card", 60_000)

    def admit(
        self,
        tenant: str,
        tier: str = "standard",
        prompt: int = 100,
        weight: float = 1.0,
        ttft_ms: int = 0,
        choices: int = 1,
    ) -> None:
        self.count += 1
        verdict = self.functions.admit(
            Admission(
                request=f"{tenant}-{self.count}", tenant=tenant, pool="m", tier=tier,
                tier_rank=RANKS[tier], gateway="g",
                generation=1, hold_nano=0, floor_nano=None, max_concurrent=-1, max_queued_tier=-1, max_queued_tenant=-1,
                choices=choices, prompt_tokens=prompt, lease_ms=60_000, weight=weight, ttft_ms=ttft_ms,
            ),
            f"{tenant}-{self.count}".encode(),
        )  # fmt: skip
        assert verdict.ok

    def pull(self, **credit: int) -> list[str]:
        """`express` is credit under "+", `express_standard` under "+standard"."""
        offered = {name.replace("express", "+").replace("+_", "+"): n for name, n in credit.items()}
        self.pulled = self.functions.pull("m", "e", offered, 60_000).works
        return [work.work.decode() for work in self.pulled]

    def tenants(self, **credit: int) -> list[str]:
        return [name.partition("-")[0] for name in self.pull(**credit)]


@pytest.fixture
def pool(functions: ClockedFunctions) -> Pool:
    return Pool(functions)


def test_a_flood_does_not_hold_up_a_tenant_that_was_served_less(pool: Pool) -> None:
    for _ in range(20):
        pool.admit("flood")
    assert pool.tenants(standard=3) == ["flood"] * 3
    pool.admit("quiet")
    pool.functions.charge("m", [("standard", "flood", 100.0)])
    assert pool.tenants(standard=2) == ["quiet", "flood"]


def test_pulls_follow_weights(pool: Pool) -> None:
    for _ in range(40):
        pool.admit("one", weight=1.0)
        pool.admit("three", weight=3.0)
    pulled = pool.tenants(standard=40)
    assert pulled.count("three") == pytest.approx(30, abs=2)


def test_strict_tiers_but_for_a_floor_that_is_due(pool: Pool) -> None:
    for _ in range(5):
        pool.admit("jobs", "batch")
        pool.admit("chat", "interactive")
    assert pool.tenants(interactive=1, batch=1) == ["chat"]
    pool.functions.charge("m", [("interactive", "chat", QUANTUM / UNIT / 0.05)])
    pulled = pool.functions.pull("m", "e", {"interactive": 2, "batch": 2}, 60_000)
    assert [(w.work.decode().partition("-")[0], w.by_floor) for w in pulled.works] == [("jobs", True), ("chat", False)]
    assert pulled.accounts["batch"] < QUANTUM / UNIT


def test_a_tenant_back_from_idle_has_saved_up_nothing(pool: Pool) -> None:
    pool.admit("busy")
    pool.functions.charge("m", [("standard", "busy", 5000.0)])
    pool.admit("idle")
    pool.admit("busy")
    pulled = pool.functions.pull("m", "e", {"standard": 3}, 60_000)
    assert pulled.accounts["standard:idle"] == 5100.0


def serve(pool: Pool, tenant: str, cost: float) -> None:
    """One request of the tenant comes, costs so much besides its prompt of 100, and ends."""
    pool.admit(tenant)
    request = f"{tenant}-{pool.count}"
    assert request in pool.pull(standard=64)
    pool.functions.charge("m", [("standard", tenant, cost)])
    assert pool.functions.finish(request, 0, final(request))


def test_what_was_used_while_nobody_else_asked_is_held_against_nobody(pool: Pool) -> None:
    serve(pool, "quiet", 150_000.0)
    serve(pool, "flood", 0.0)  # one that left last and was served little tells nothing of the others
    for _ in range(20):
        pool.admit("flood")
    assert pool.tenants(standard=3) == ["flood"] * 3
    pool.admit("quiet")
    assert sorted(pool.tenants(standard=2)) == ["flood", "quiet"]


def test_a_tenant_that_always_has_something_running_saves_up_little(pool: Pool) -> None:
    pool.admit("steady")
    assert pool.tenants(standard=1) == ["steady"]
    serve(pool, "large", 100_000.0)
    for _ in range(200):
        pool.admit("steady", prompt=1000)
    pool.admit("large", prompt=1000)
    pulled = pool.tenants(standard=20)
    assert pulled.index("large") <= LEAD / UNIT / 1000 + 1


def test_a_row_is_kept_for_those_who_ask_for_little(pool: Pool) -> None:
    for _ in range(9):
        pool.admit("flood")
    assert pool.tenants(standard=6) == ["flood"] * 6
    assert pool.tenants(express=2) == ["flood"], "the last one is kept"
    pool.admit("quiet")
    assert pool.tenants(express=1) == ["quiet"]


def test_rows_to_be_given_up_are_for_light_tenants_of_the_tier_alone(pool: Pool) -> None:
    for _ in range(9):
        pool.admit("flood")
    assert pool.tenants(standard=6) == ["flood"] * 6
    assert pool.tenants(express_standard=2) == []
    for _ in range(3):
        pool.admit("quiet")
    assert pool.tenants(express_batch=2) == []
    assert pool.tenants(express_standard=2) == ["quiet"] * 2
    assert all(work.light for work in pool.pulled)
    assert pool.tenants(standard=1, express_standard=2) == ["flood", "quiet"]
    assert [work.light for work in pool.pulled] == [False, True]


def test_where_nobody_is_heavy_nobody_gives_up_a_row(pool: Pool) -> None:
    for tenant in ("one", "two"):
        pool.admit(tenant)
    assert pool.tenants(standard=1) == ["one"]
    assert pool.tenants(express_standard=2) == []
    assert pool.tenants(standard=1, express_standard=2) == ["two"]


def test_the_more_requests_are_light_the_more_rows_are_kept(pool: Pool) -> None:
    for _ in range(20):
        pool.admit("flood")
    assert pool.tenants(standard=8) == ["flood"] * 8
    for i in range(8):
        pool.admit(f"quiet{i % 4}")
        assert pool.tenants(express=1) == [f"quiet{i % 4}"]
    assert pool.tenants(express=4) == [], "four of ten pulled lately were light: 0.4 to the fifth is a hundredth"
    assert pool.tenants(express=9) == ["flood"] * 5, "each of these makes it fewer"


def test_one_request_of_many_choices_is_as_heavy_as_many_requests(pool: Pool) -> None:
    for _ in range(8):
        pool.admit("flood")
    assert pool.tenants(standard=8) == ["flood"] * 8
    pool.admit("wide", choices=16)
    pool.admit("quiet")
    assert pool.tenants(express=1) == ["quiet"], "a row that is kept is not for sixteen choices"
    assert pool.tenants(standard=1) == ["wide"]


def test_a_pool_without_a_flood_learns_nothing_about_one(pool: Pool) -> None:
    for i in range(20):
        pool.admit(f"quiet{i}")
        assert pool.tenants(standard=4) == [f"quiet{i}"]
    for _ in range(12):
        pool.admit("flood")
    assert pool.tenants(express=4) == ["flood"] * 3, "one row is kept, as when nobody was light lately"


def test_a_light_request_is_never_late(pool: Pool) -> None:
    for _ in range(20):
        pool.admit("flood", ttft_ms=1000)
    pool.admit("quiet", ttft_ms=1000)
    pool.functions.set_clock(1_000_900)
    assert pool.pull(express=1) == ["quiet-21"]
    pool.admit("flood", ttft_ms=1000)
    assert pool.pull(standard=1) == ["flood-22"], "those of the flood are"


def test_who_was_served_far_more_than_the_flood_queues_as_all_do(pool: Pool) -> None:
    for _ in range(9):
        pool.admit("flood")
    assert pool.tenants(standard=6) == ["flood"] * 6
    pool.admit("large")
    pool.functions.charge("m", [("standard", "large", LEAD / UNIT + 1000.0)])
    assert pool.tenants(express=1) == []
    pool.functions.charge("m", [("standard", "flood", 1000.0)])
    assert pool.tenants(express=1) == ["large"]


def test_a_refund_brings_a_tenant_forward(pool: Pool) -> None:
    for tenant in ("a", "b"):
        for _ in range(3):
            pool.admit(tenant, prompt=1)
    pool.functions.charge("m", [("standard", "a", 500.0), ("standard", "b", 400.0)])
    assert pool.tenants(standard=1) == ["b"]
    pool.functions.charge("m", [("standard", "a", -300.0)])
    assert pool.tenants(standard=1) == ["a"]


def nobody(tier: str, late: bool) -> list[tuple[int, str]]:
    return []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-500, 100_000)), max_size=30))
def test_after_any_history_all_begin_level_in_a_tier_that_was_empty(history: list[tuple[str, int]]) -> None:
    queue = FairQueue()
    for tenant, cost in history:
        queue.enter("standard", tenant, nobody)
        queue.charge("standard", tenant, cost * UNIT, [])
        queue.leave("standard", tenant)
    queue.enter("standard", "b", nobody)
    queue.enter("standard", "a", lambda _, late: [] if late else [(1, "b")])
    a, b = (queue.counters.get(("standard", tenant), 0) for tenant in "ab")
    assert a == b == max([0, *queue.counters.values()])


def test_spread_of_service_between_backlogged_tenants_of_the_queue_is_within_the_gate_and_a_prompt() -> None:
    queue = FairQueue()
    left = {"a": 60, "b": 60, "c": 60}
    for tenant in left:
        queue.enter("standard", tenant, nobody)
    arrival = {"a": 1, "b": 2, "c": 3}
    prompts = {"a": 700, "b": 30, "c": 170}
    tiers, credit = [("standard", 1)], {"standard": 1}
    while min(left.values()):
        tiers, credit = [("standard", 1)], {"standard": 1}
        heads = sorted((v, k) for k, v in arrival.items())
        picked = queue.pick(
            tiers, credit, lambda _, late, heads=heads: [] if late else heads, queue.lines(tiers, credit)
        )
        assert picked is not None
        left[picked.tenant] -= 1
        arrival[picked.tenant] += 3
        queue.charge("standard", picked.tenant, prompts[picked.tenant] * UNIT, [("standard", 1)])
        counters = [queue.counters.get(("standard", tenant), 0) for tenant in left]
        assert max(counters) - min(counters) <= 700 * UNIT + GATE


def test_a_late_head_does_not_hide_those_behind_it_and_is_not_forgotten(pool: Pool) -> None:
    for _ in range(2):
        pool.admit("a", ttft_ms=1000)
    pool.functions.set_clock(1_000_900)
    for _ in range(20):
        pool.admit("a", ttft_ms=10_000)
    first = pool.pull(standard=1)
    assert first == ["a-3"]
    rest = [name for _ in range(21) for name in pool.pull(standard=1)]
    assert rest[15] == "a-1", "sixteen others, then a late one"
    assert rest[-1] == "a-2"
    assert len({*first, *rest}) == 22
