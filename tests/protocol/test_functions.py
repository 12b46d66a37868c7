"""What the functions promise, call by call, on a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis

from engine.protocol.functions import Admission, Claim, Functions, Verdict
from engine.protocol.keys import Keys
from engine.protocol.messages import Control, Delta, Final, Timeline, decode, encode
from tests.protocol.conftest import ClockedFunctions

NOW = 1_000_000


def admission(request: str, **changes: Any) -> Admission:
    facts: dict[str, Any] = {
        "request": request, "tenant": "alpha", "pool": "m", "tier": "standard", "tier_rank": 1, "gateway": "g1",
        "generation": 1, "hold_nano": 100, "floor_nano": None, "max_concurrent": -1, "max_queued_tier": -1,
        "max_queued_tenant": -1, "choices": 1, "prompt_tokens": 5, "lease_ms": 10_000,
    }  # fmt: skip
    return Admission(**(facts | changes))


def final(request: str, epoch: int = 0, reason: str = "stop") -> bytes:
    return encode(Final(request, epoch, "m", "standard", "alpha", "e1", reason, 5, 0, 3, 0, 0.1, 0.0, Timeline(), NOW))


class Cell:
    """The functions with a live engine and a live gateway, and what the tests ask of them."""

    def __init__(self, functions: ClockedFunctions) -> None:
        self.f, self.keys = functions, functions.keys
        self.redis: Any = functions.redis
        assert self.f.register("m", "e1", "hash", b"card", 10_000) == "ok"
        assert self.f.renew("g1", 10_000)

    def admit(self, request: str, **changes: Any) -> Verdict:
        return self.f.admit(admission(request, **changes), request.encode())

    def pull(self, credit: int = 1, engine: str = "e1") -> list[str]:
        pulled = self.f.pull("m", engine, dict.fromkeys(("interactive", "standard", "batch"), credit), 10_000)
        return [one.work.decode().removesuffix("-again") for one in pulled.works]

    def replies(self, gateway: str = "g1") -> list[Delta]:
        return [d for _, f in self.redis.xrange(self.keys.replies(gateway)) for d in decode(f[b"d"], list[Delta])]

    def usage(self) -> list[Final]:
        return [decode(f[b"f"], Final) for _, f in self.redis.xrange(self.keys.usage)]

    def state(self, request: str) -> str | None:
        raw = self.redis.hget(self.keys.request(request), "state")
        return raw.decode() if raw else None

    def held(self) -> int:
        return int(self.redis.hget(self.keys.account("alpha"), "held") or 0)

    def open(self) -> set[bytes]:
        return set(self.redis.smembers(self.keys.open_by_tenant("alpha")))

    def later(self, seconds: float) -> None:
        """Let time pass; nobody renews, nobody reaps."""
        self.f.set_clock(int(self.redis.get(f"{self.keys.prefix}test_now") or 0) + int(seconds * 1000))

    def arm(self) -> None:
        """The reaper has been running for longer than a lease."""
        self.f.reap()
        for _ in range(2):
            self.later(2)
            self.f.renew("g1", 10_000)
            self.pull(0)
            self.f.reap()


@pytest.fixture
def cell(functions: ClockedFunctions) -> Cell:
    return Cell(functions)


def footprint(cell: Cell) -> dict[bytes, bytes]:
    """A dump of every key that an admission could touch."""
    names = [k for k in cell.redis.scan_iter(match=f"{cell.keys.prefix}*") if b"test_now" not in k]
    return {name: cell.redis.dump(name) or b"" for name in names}


# Admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "detail"),
    [
        ({"pool": "other"}, "no_engine", ""),
        ({"max_concurrent": 1}, "concurrency_limit", ""),
        ({"limits": (("rpm", 10, 60, 1), ("tpm", 100, 60, 101))}, "rate_limit", "tpm"),
        ({"max_queued_tenant": 1}, "tenant_queue_full", ""),
        ({"max_queued_tier": 1}, "tier_queue_full", ""),
        ({"floor_nano": 0}, "insufficient_quota", ""),
        ({"generation": 0}, "stale_principal", ""),
        ({"claim": Claim("key", "other digest")}, "idempotency_conflict", "first"),
        ({"claim": Claim("key", "digest")}, "idempotency_in_flight", "first"),
    ],
)
def test_a_refusal_consumes_nothing(cell: Cell, changes: dict[str, Any], code: str, detail: str) -> None:
    cell.f.account("alpha", 1, 150, 1)
    assert cell.admit("first", claim=Claim("key", "digest")).ok
    before = footprint(cell)
    verdict = cell.admit("second", **changes)
    assert (verdict.code, verdict.detail) == (code, detail)
    assert footprint(cell) == before


def test_a_sheddable_request_is_refused_when_its_deadline_is_lost_already(cell: Cell) -> None:
    for number in range(4):
        assert cell.admit(f"r{number}").ok
    cell.later(1)
    assert cell.pull() == ["r0"]
    cell.later(1)
    assert cell.pull() == ["r1"], "one a second"
    assert cell.admit("hurried", ttft_ms=1000).ok, "others are not refused"
    lost = cell.admit("lost", ttft_ms=1000, sheddable=True)
    assert (lost.code, lost.detail, lost.retry_after_s) == ("tier_queue_full", "deadline", 3)
    assert cell.admit("patient", ttft_ms=9000, sheddable=True).ok
    assert cell.admit("another's", ttft_ms=1000, sheddable=True, tenant="beta").ok, "tenants are served in turn"


def test_a_deadline_is_lost_to_those_who_wait_by_their_weight_and_not_to_those_who_run(cell: Cell) -> None:
    hurried: dict[str, Any] = {"ttft_ms": 2500, "sheddable": True, "tenant": "beta"}
    for request, tenant in (("c0", "gamma"), *((f"a{n}", "alpha") for n in range(4)), ("b0", "beta")):
        assert cell.admit(request, tenant=tenant).ok
    for run in ("c0", "a0"):
        cell.later(1)
        assert cell.pull() == [run], "one a second"
    assert cell.admit("equal", **hurried).ok, "one of alpha's and its own are before it; gamma has nothing queued"
    cell.f.cancel("equal", "no more")
    assert cell.admit("a4", weight=3.0).ok, "alpha has three turns to one of beta's now"
    assert cell.admit("lighter", **hurried).detail == "deadline"


def test_money_is_held_from_admission_to_close(cell: Cell) -> None:
    cell.f.account("alpha", 1, 250, 1)
    assert cell.admit("r1", floor_nano=0).ok and cell.admit("r2", floor_nano=0).ok
    assert cell.admit("r3", floor_nano=0).code == "insufficient_quota"
    assert cell.pull() == ["r1"]
    assert cell.f.finish("r1", 0, final("r1"))
    assert cell.held() == 200, "the hold stays until the settlement is known"
    assert cell.f.close("r1", "alpha", 240, 2)
    assert cell.held() == 100
    assert cell.admit("r3", floor_nano=0).ok


def test_concurrent_admissions_buy_what_the_money_buys(redis: Redis, redis_prefix: str) -> None:
    functions = Functions(redis, Keys(redis_prefix))
    functions.register("m", "e1", "hash", b"card", 60_000)
    functions.account("alpha", 1, 300, 1)
    with ThreadPoolExecutor(25) as pool:
        verdicts = list(pool.map(lambda i: functions.admit(admission(f"r{i}", floor_nano=0), b"w"), range(50)))
    assert sum(v.ok for v in verdicts) == 3
    assert {v.code for v in verdicts if not v.ok} == {"insufficient_quota"}


def test_a_wiped_balance_asks_for_it_instead_of_refusing(cell: Cell) -> None:
    assert cell.admit("r1", floor_nano=0).code == "stale_principal"
    assert cell.admit("r1", floor_nano=0).detail == "balance"
    assert cell.f.account("alpha", 1, 100, 7)
    assert cell.admit("r1", floor_nano=0).ok


def test_an_older_balance_or_generation_changes_nothing(cell: Cell) -> None:
    assert cell.f.account("alpha", 5, 1000, 10)
    assert not cell.f.account("alpha", 4, 1, 9)
    assert cell.admit("r1", generation=4).code == "stale_principal"
    assert cell.admit("r2", generation=5, floor_nano=900).ok


def test_nano_units_keep_every_digit(cell: Cell) -> None:
    much = 9_007_199_254_740_001
    assert cell.f.account("alpha", 1, much, 1)
    assert cell.admit("r1", hold_nano=9_007_199_254_739_999, floor_nano=2).ok
    assert cell.held() == 9_007_199_254_739_999
    assert cell.admit("r2", hold_nano=1, floor_nano=2).code == "insufficient_quota"


def test_admitting_twice_is_admitting_once(cell: Cell) -> None:
    assert cell.admit("r1").depth == 1
    assert cell.admit("r1").depth == 1
    assert cell.held() == 100
    assert cell.pull(9) == ["r1"]


def test_a_token_bucket_refills(cell: Cell) -> None:
    limits = (("rpm", 2, 60, 1),)
    assert cell.admit("r1", limits=limits).limits == (("rpm", 2, 1, 1),)
    assert cell.admit("r2", limits=limits).ok
    refused = cell.admit("r3", limits=limits)
    assert (refused.code, refused.retry_after_s, refused.limits) == ("rate_limit", 1, (("rpm", 2, 0, 2),))
    cell.later(1)
    assert cell.admit("r3", limits=limits).ok


def test_retry_after_comes_from_the_measured_drain(cell: Cell) -> None:
    assert cell.admit("q0", max_queued_tier=1).ok
    assert cell.admit("q1", max_queued_tier=1).retry_after_s is None, "nothing was drained yet"
    for i in range(1, 4):
        cell.later(3)
        assert len(cell.pull()) == 1
        assert cell.admit(f"q{i}").ok
    assert cell.admit("q9", max_queued_tier=1).retry_after_s == 3
    cell.later(9999)
    cell.f.register("m", "e1", "hash", b"card", 10_000)
    assert cell.admit("q9", max_queued_tier=1).retry_after_s == 60, "capped"


def test_an_idempotency_claim_lives_until_the_answer_does(cell: Cell) -> None:
    claim = Claim("key", "digest", 60_000)
    assert cell.admit("r1", claim=claim).ok
    cell.pull()
    cell.f.finish("r1", 0, final("r1"))
    assert cell.admit("r2", claim=claim).code == "idempotency_replay"
    cell.later(61)
    cell.f.register("m", "e1", "hash", b"card", 10_000)
    assert cell.admit("r3", claim=claim).ok


@pytest.mark.parametrize("ending", ["cancelled while queued", "aborted"])
def test_a_request_without_an_answer_frees_its_claim(cell: Cell, ending: str) -> None:
    claim = Claim("key", "digest")
    assert cell.admit("r1", claim=claim).ok
    if ending == "aborted":
        cell.pull()
        cell.f.finish("r1", 0, final("r1", reason="abort"))
    else:
        cell.f.cancel("r1", "client_gone")
    assert cell.admit("r2", claim=claim).ok


# Queue -----------------------------------------------------------------------------------------------------------


def test_the_oldest_of_a_tenant_comes_first_and_once(cell: Cell) -> None:
    for i in range(5):
        cell.admit(f"r{i}")
    assert cell.pull(2) == ["r0", "r1"]
    assert cell.pull(9) == ["r2", "r3", "r4"]
    assert cell.pull(9) == []


def test_a_request_larger_than_the_credit_is_not_stranded(cell: Cell) -> None:
    cell.admit("wide", choices=4)
    cell.admit("small")
    assert cell.pull(1) == ["wide"]
    assert cell.pull(1) == ["small"]


def test_credit_is_one_room_for_all_tiers(cell: Cell) -> None:
    for tier, rank in (("interactive", 0), ("standard", 1), ("batch", 2)):
        for i in range(3):
            cell.admit(f"{tier}{i}", tier=tier, tier_rank=rank)
    assert len(cell.pull(3)) == 3


def test_a_cancel_in_the_middle_of_a_queue_leaves_the_rest_in_order(cell: Cell) -> None:
    for i in range(4):
        cell.admit(f"r{i}")
    assert cell.f.cancel("r0", "x").was == "queued"
    assert cell.f.cancel("r2", "x").was == "queued"
    assert cell.pull(9) == ["r1", "r3"]


def test_an_ended_request_leaves_no_key(cell: Cell) -> None:
    before = set(cell.redis.scan_iter(match=f"{cell.keys.prefix}*"))
    for request in ("cancelled", "finished"):
        cell.admit(request)
    cell.f.cancel("cancelled", "x")
    cell.pull()
    cell.f.finish("finished", 0, final("finished"))
    cell.f.close("finished", "alpha", None, 0)
    names = (
        k.decode().removeprefix(cell.keys.prefix) for k in set(cell.redis.scan_iter(f"{cell.keys.prefix}*")) - before
    )
    for_the_pool = (
        "arrivals",
        "usage",
        "wake:m",
        "drain:m",
        "tiers:m",
        "vtc:m",
        "deficit:m",
        "weight:m",
        "passed:m",
        "era",
    )
    assert [name for name in names if name.startswith(("req:", "q:")) or not name.startswith(for_the_pool)] == []


def test_a_queued_request_expires_with_a_word_to_its_gateway(cell: Cell) -> None:
    cell.admit("r1", expires_ms=NOW + 500)
    cell.admit("r2", expires_ms=NOW + 500)
    cell.admit("r3")
    cell.later(1)
    assert cell.pull(9) == ["r3"]
    assert [(d.request, d.finish, d.code, d.last) for d in cell.replies()] == [
        ("r1", "error", "queue_timeout", True),
        ("r2", "error", "queue_timeout", True),
    ]
    assert cell.open() == {b"r3"}


def test_expiry_needs_no_pull(cell: Cell) -> None:
    cell.admit("r1", expires_ms=NOW + 500)
    cell.later(1)
    cell.f.reap()
    assert [d.code for d in cell.replies()] == ["queue_timeout"]


def test_a_vanished_consumer_group_is_made_again(cell: Cell) -> None:
    cell.admit("r1")
    cell.admit("r2")
    assert cell.pull() == ["r1"]
    cell.redis.xgroup_destroy(cell.keys.queue("m", "standard", "alpha"), "engines")
    assert cell.pull(9) == ["r2"], "and what runs already is not handed out twice"


def test_an_entry_without_a_record_stops_nothing(cell: Cell) -> None:
    cell.admit("gone")
    cell.admit("r1")
    cell.redis.delete(cell.keys.request("gone"))
    assert cell.pull(9) == ["r1"]


def test_an_engine_without_a_lease_gets_nothing(cell: Cell) -> None:
    cell.admit("r1")
    answer = cell.f.pull("m", "stranger", {"standard": 1})
    assert not answer.registered and not answer.works
    assert cell.state("r1") == "queued"


# Endings ---------------------------------------------------------------------------------------------------------


def test_finish_is_accepted_once_and_frees_the_slot(cell: Cell) -> None:
    cell.admit("r1", max_concurrent=1)
    cell.pull()
    assert not cell.f.finish("r1", 1, final("r1", 1)), "an epoch that is not the request's"
    assert cell.f.finish("r1", 0, final("r1"))
    assert not cell.f.finish("r1", 0, final("r1"))
    assert [f.request for f in cell.usage()] == ["r1"]
    assert cell.admit("r2", max_concurrent=1).ok


def test_cancel_of_a_running_request_is_an_order_delivered_once(cell: Cell) -> None:
    cell.admit("r1")
    cell.pull()
    assert cell.f.cancel("r1", "client_gone").was == "running"
    assert cell.redis.llen(cell.keys.wake("e1")) == 1
    controls = cell.f.pull("m", "e1", {}).controls
    assert [decode(c, Control) for c in controls] == [Control("cancel", "r1", "client_gone")]
    assert cell.f.pull("m", "e1", {}).controls == ()


def test_a_dead_engine_loses_its_requests_to_their_gateway(cell: Cell) -> None:
    cell.arm()
    cell.admit("r1")
    cell.pull()
    for _ in range(6):
        cell.later(2)
        cell.f.renew("g1", 10_000)
        reaped = cell.f.reap()
    assert reaped.dead_engines == () and cell.state("r1") == "lost"
    assert [(d.request, d.epoch, d.code, d.last) for d in cell.replies()] == [("r1", 1, "engine_lost", True)]
    assert not cell.f.finish("r1", 0, final("r1")), "the engine may only have slept"
    assert cell.f.finish("r1", 1, final("r1", 1, "lost"))
    assert len(cell.usage()) == 1


def test_a_pause_of_redis_is_not_the_death_of_everyone(cell: Cell) -> None:
    cell.arm()
    cell.admit("r1")
    cell.pull()
    cell.later(60)
    assert cell.f.reap().dead_engines == (), "the first reap after a pause only arms"
    cell.later(1)
    cell.pull(0)
    cell.f.renew("g1", 10_000)
    cell.later(2.5)
    assert cell.f.reap().dead_engines == ()
    assert cell.state("r1") == "running"


def test_a_dead_gateway_frees_what_it_held(cell: Cell) -> None:
    cell.arm()
    cell.admit("running", gateway="g2", lease_ms=3000)
    cell.pull()
    cell.admit("queued", gateway="g2", lease_ms=3000)
    cell.later(2)
    cell.f.reap()
    cell.later(2)
    reaped = cell.f.reap()
    assert (reaped.dead_gateways, reaped.aborted) == (("g2",), ("queued", "running"))
    assert (cell.state("queued"), cell.state("running")) == (None, "running")
    assert [decode(c, Control).argument for c in cell.f.pull("m", "e1", {}).controls] == ["running"]
    assert not cell.redis.exists(cell.keys.replies("g2"))
    assert not cell.f.renew("g2"), "it is told once that its requests are gone"
    assert cell.f.renew("g2")


def test_engine_and_gateway_dead_leaves_one_final(cell: Cell) -> None:
    cell.arm()
    cell.admit("r1", gateway="g2", lease_ms=3000)
    cell.pull()
    cell.later(2)
    cell.f.reap()
    cell.later(2)
    cell.f.reap()
    for _ in range(5):
        cell.later(2)
        cell.f.reap()
    [only] = cell.usage()
    assert (only.request, only.reason, only.epoch, only.prompt_tokens, only.completion_tokens) == (
        "r1",
        "lost",
        1,
        5,
        0,
    )
    assert (cell.state("r1"), cell.open()) == ("finished", set())


def lose(cell: Cell) -> None:
    """The engine restarts under its id: what it had is lost at once."""
    cell.f.register("m", "e1", "hash", b"card", 10_000)


def test_a_lost_request_goes_back_to_its_place(cell: Cell) -> None:
    for i in range(3):
        cell.admit(f"r{i}")
    cell.pull()
    lose(cell)
    assert cell.f.requeue("r0", 0, b"r0-again") == "stale"
    assert cell.f.requeue("r0", 1, b"r0-again") == "queued"
    assert cell.pull(9) == ["r0", "r1", "r2"]
    assert cell.f.finish("r0", 1, final("r0", 1))


def test_a_poison_request_is_tried_so_often_and_kept(cell: Cell) -> None:
    cell.admit("bad")
    for attempt in range(1, 4):
        assert cell.pull() == ["bad"]
        lose(cell)
        answer = cell.f.requeue("bad", attempt, b"bad-again", 3)
        assert answer == ("queued" if attempt < 3 else "poison")
    assert [f[b"r"] for _, f in cell.redis.xrange(cell.keys.dead)] == [b"bad"]
    assert cell.f.finish("bad", 3, final("bad", 3, "error"))


def test_cancel_of_a_requeued_request_leaves_its_end_to_the_gateway(cell: Cell) -> None:
    cell.admit("r1")
    cell.pull()
    lose(cell)
    cell.f.requeue("r1", 1, b"r1-again")
    assert cell.f.cancel("r1", "client_gone").was == "lost"
    assert cell.pull() == []
    assert cell.f.finish("r1", 1, final("r1", 1, "abort")), "it had computed tokens: there is a usage record"


def test_a_pool_has_one_card(cell: Cell) -> None:
    assert cell.f.register("m", "e2", "other", b"card", 10_000) == "card_mismatch"
    assert cell.f.register("m", "e2", "hash", b"card", 10_000) == "ok"
    cell.f.leave("m", "e1")
    cell.f.leave("m", "e2")
    assert cell.f.register("m", "e3", "other", b"card", 10_000) == "ok"


def test_close_takes_the_higher_sequence(cell: Cell) -> None:
    cell.f.account("alpha", 1, 1000, 5)
    cell.admit("r1")
    cell.pull()
    cell.f.finish("r1", 0, final("r1"))
    assert cell.f.close("r1", "alpha", 1, 4)
    assert cell.redis.hget(cell.keys.account("alpha"), "balance") == b"1000"
    assert not cell.f.close("r1", "alpha", 900, 6), "forgotten already, but the balance is news"
    assert cell.redis.hget(cell.keys.account("alpha"), "balance") == b"900"


def test_production_reads_no_clock_from_a_key(redis: Redis, redis_prefix: str) -> None:
    assert "test_now" not in Functions.source()
    redis.set(f"{redis_prefix}test_now", 1)
    functions = Functions(redis, Keys(redis_prefix))
    functions.renew("g1", 3000)
    assert int(redis.zscore(Keys(redis_prefix).gateways, "g1") or 0) > 1_700_000_000_000


def test_the_library_returns_after_it_was_flushed(cell: Cell, redis: Redis) -> None:
    redis.function_delete(ClockedFunctions.library)
    assert cell.admit("r1").ok
