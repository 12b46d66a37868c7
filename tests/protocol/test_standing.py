"""An admission pulls for an engine that waits: when it does, what it hands over, and when it leaves it to a pull."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from engine.protocol.functions import Handed, Pulled
from tests.protocol.conftest import ClockedFunctions
from tests.protocol.test_functions import NOW, Cell, admission, final

ALL = ("interactive", "standard", "batch")


class Pool(Cell):
    """Engines that listen, and what each has heard."""

    def __init__(self, functions: ClockedFunctions) -> None:
        super().__init__(functions)
        assert self.f.register("m", "e2", "hash", b"card", 10_000) == "ok"
        self.ears = {engine: self.redis.pubsub() for engine in ("e1", "e2")}
        for engine in self.ears:
            self.listen(engine)

    def listen(self, engine: str) -> None:
        self.ears[engine].subscribe(self.keys.hand(engine))
        assert self.ears[engine].get_message(timeout=5)["type"] == "subscribe"

    def deafen(self, engine: str) -> None:
        self.ears[engine].unsubscribe()
        assert self.ears[engine].get_message(timeout=5)["type"] == "unsubscribe"

    def stand(self, engine: str = "e1", slots: int = 1, tokens: int = 1000, **credit: int) -> list[str]:
        pulled = self.f.pull("m", engine, credit or dict.fromkeys(ALL, slots), 10_000, tokens)
        return [one.work.decode() for one in pulled.works]

    def heard(self, engine: str = "e1") -> list[str]:
        """What was published is in the socket when the server has answered once more."""
        self.redis.ping()
        found = []
        while (message := self.ears[engine].get_message(timeout=0.05)) is not None:
            found.append(Handed.read(message["data"]).pulled.work.decode())
        return found


@pytest.fixture
def pool(functions: ClockedFunctions) -> Iterator[Pool]:
    pool = Pool(functions)
    yield pool
    for ear in pool.ears.values():
        ear.close()


def test_an_engine_that_waits_has_the_request_at_once(pool: Pool) -> None:
    pool.stand()
    verdict = pool.admit("r1")
    assert verdict.ok and verdict.depth == 0
    assert pool.heard() == ["r1"]
    assert pool.state("r1") == "running"
    assert pool.redis.smembers(pool.keys.engine_requests("e1")) == {b"r1"}, "where it is found if the message is lost"
    assert pool.redis.llen(pool.keys.wake("m")) == 0, "nobody is woken for it"
    assert pool.stand() == [], "nor pulls it again"
    assert pool.f.finish("r1", 0, final("r1"))
    assert not pool.redis.keys(pool.keys.queue("m", "*", "*"))


def test_the_message_says_what_a_pull_would(pool: Pool) -> None:
    pool.f.charge("m", [("standard", "alpha", 40.0)])
    pool.stand()
    pool.admit("r1", prompt_tokens=7)
    message = pool.ears["e1"].get_message(timeout=5)
    handed = Handed.read(message["data"])
    assert handed.pulled == Pulled(b"r1", 0, by_floor=False, light=True)
    assert handed.accounts == {"standard:alpha": 47.0, "standard": -47.0}


def test_its_credit_is_spent_in_rows_and_in_tokens(pool: Pool) -> None:
    pool.stand(slots=2)
    for request in ("r1", "r2", "r3"):
        pool.admit(request)
    assert pool.heard() == ["r1", "r2"]
    assert pool.state("r3") == "queued" and pool.redis.llen(pool.keys.wake("m")) == 1
    assert pool.stand(slots=9, tokens=10) == ["r3"]
    for request in ("r4", "r5"):
        pool.admit(request)  # of 5 tokens each, and 5 are left
    assert pool.heard() == ["r4"] and pool.state("r5") == "queued"


def test_what_is_on_its_way_is_taken_from_a_credit_that_does_not_count_it(pool: Pool) -> None:
    pool.stand(slots=2)
    pool.admit("r1")
    pool.f.pull("m", "e1", dict.fromkeys(ALL, 2), 10_000, 1000, 0)  # r1 has not been heard of
    pool.admit("r2")
    pool.admit("r3")
    assert pool.heard() == ["r1", "r2"] and pool.state("r3") == "queued"
    assert len(pool.f.pull("m", "e1", dict.fromkeys(ALL, 1), 10_000, 1000, 2).works) == 1


def test_what_is_on_its_way_takes_the_rows_for_light_tenants_too(pool: Pool) -> None:
    pool.stand(slots=4)
    for request in ("r1", "r2", "r3", "r4"):
        pool.admit(request)
    for request in ("r5", "r6"):
        pool.admit(request)
    credit = {**dict.fromkeys(ALL, 3), "+": 3}  # six rows for four that come; one of the others is kept
    assert [one.work for one in pool.f.pull("m", "e1", credit, 10_000, 1000, 0).works] == [b"r5"]


def test_a_tier_that_nobody_has_asked_for_is_no_room_of_its_own(pool: Pool) -> None:
    pool.stand(slots=1)
    pool.admit("r1")
    pool.admit("r2", tier="batch", tier_rank=2)
    assert pool.heard() == ["r1"] and pool.state("r2") == "queued"


def test_a_request_of_more_choices_than_rows_is_handed_over_as_it_is_pulled(pool: Pool) -> None:
    pool.stand(slots=1)
    pool.admit("r1", choices=3)
    assert pool.heard() == ["r1"]


def test_engines_take_turns(pool: Pool) -> None:
    pool.stand("e1", slots=9)
    pool.stand("e2", slots=9)
    for request in ("r1", "r2", "r3", "r4"):
        pool.admit(request)
    assert (pool.heard("e1"), pool.heard("e2")) == (["r1", "r3"], ["r2", "r4"])


def test_a_killed_engine_is_handed_nothing(pool: Pool) -> None:
    """Its connection is closed, though its lease and its credit have not run out."""
    pool.stand("e1")
    pool.stand("e2")
    pool.deafen("e1")
    pool.admit("r1")
    assert pool.heard("e2") == ["r1"]
    pool.deafen("e2")
    pool.stand("e2")
    pool.admit("r2")
    assert pool.state("r2") == "queued" and pool.redis.llen(pool.keys.wake("m")) == 1


def test_a_silent_engine_is_handed_nothing_after_a_while(pool: Pool) -> None:
    pool.stand()
    pool.f.set_clock(NOW + 400)
    pool.admit("r1")
    assert pool.state("r1") == "queued" and pool.heard() == []


@pytest.mark.parametrize("how", ["leave", "register", "reap", "pull"])
def test_who_takes_no_more_is_handed_nothing(pool: Pool, how: str) -> None:
    pool.stand()
    if how == "leave":
        pool.f.leave("m", "e1")
    elif how == "register":
        pool.f.register("m", "e1", "hash", b"card", 10_000)
    elif how == "reap":
        pool.f.leave("m", "e2")
        for second in range(12):
            pool.f.set_clock(NOW + 1000 * second)
            pool.f.reap()
        assert not pool.redis.exists(pool.keys.standing("m"), pool.keys.credit("m"))
        assert pool.f.register("m", "e2", "hash", b"card", 10_000) == "ok"
        assert pool.f.renew("g1", 10_000) in (True, False)
    else:
        pool.stand(slots=0)
    pool.admit("r1")
    assert pool.state("r1") == "queued" and pool.heard() == []


def test_who_waited_longer_goes_first(pool: Pool) -> None:
    """What waits was admitted before anybody stood: the admission hands that over, and its own request waits."""
    pool.f.charge("m", [("standard", "alpha", 1e6)])
    pool.admit("old", tenant="beta")
    pool.stand(interactive=1)
    pool.redis.hset(pool.keys.credit("m"), "e1", _standing(standard=1))
    verdict = pool.admit("new")
    assert pool.heard() == ["old"] and verdict.depth == 1
    assert (pool.state("old"), pool.state("new")) == ("running", "queued")
    assert pool.redis.llen(pool.keys.wake("m")) > 0


def _standing(**credit: int) -> str:
    return json.dumps({"credit": credit, "tokens": 100, "until": NOW + 400})


def test_a_long_work_waits_for_a_pull(pool: Pool) -> None:
    pool.stand()
    work = b"x" * 65_537
    verdict = pool.f.admit(admission("r1"), work)
    assert verdict.ok and pool.heard() == [] and pool.state("r1") == "queued"
    pulled = pool.f.pull("m", "e1", {"standard": 1}, 10_000)
    assert [one.work for one in pulled.works] == [work]


def test_an_admission_asked_again_hands_nothing_over_twice(pool: Pool) -> None:
    pool.stand(slots=5)
    pool.admit("r1")
    assert pool.admit("r1").ok
    assert pool.heard() == ["r1"]


def test_the_queue_goes_on_behind_what_was_handed_over(pool: Pool) -> None:
    """The stream of a tenant has entries that no pull has read, and its group is told so."""
    pool.stand(slots=2)
    pool.admit("r1")
    pool.admit("r2")
    pool.admit("r3")
    pool.admit("r4")
    assert pool.heard() == ["r1", "r2"]
    assert pool.pull(credit=9) == ["r3", "r4"]


def test_a_vanished_group_is_made_anew(pool: Pool) -> None:
    pool.stand(slots=2)
    pool.admit("r1")
    pool.redis.xgroup_destroy(pool.keys.queue("m", "standard", "alpha"), "engines")
    pool.admit("r2")
    pool.admit("r3")
    assert pool.heard() == ["r1", "r2"]
    assert pool.pull(credit=9) == ["r3"]


def test_a_handed_request_is_lost_and_cancelled_as_any_other(pool: Pool) -> None:
    pool.stand(slots=2)
    pool.admit("r1")
    pool.admit("r2")
    assert pool.f.cancel("r1", "client_gone").was == "running"
    pool.f.leave("m", "e1")
    assert pool.state("r1") == pool.state("r2") == "lost"
    assert [d.code for d in pool.replies()] == ["engine_lost", "engine_lost"]
