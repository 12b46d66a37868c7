"""M1, M3, M4: acknowledged after the commit, counted once, nothing lost and nothing blocked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import DataError
from redis.client import Redis

from engine.protocol.events import Kind
from engine.protocol.keys import Keys
from engine.protocol.messages import Final, Outcome, Refusal, encode
from gateway.metering import outcomes
from gateway.metering.models import DirtyMinute, RefusalTally, RequestOutcome, StreamCursor
from gateway.metering.pump import Pump
from gateway.metering.refusals import tally
from gateway.metering.streams import GROUP, GroupReader
from gateway.metering.usage import Settler
from gateway.metering.worker import readers
from tenants import services
from tenants.billing.models import ServedModel, UsageRecord
from tenants.billing.reconcile import reconcile
from tenants.billing.selectors import balance
from tests.billing.build import ACTOR, COST, final, outcome, price, request_id, tenant
from tests.metering.servers import await_events, away, card

pytestmark = pytest.mark.django_db


@pytest.fixture
def keys(redis_prefix: str) -> Keys:
    return Keys(redis_prefix)


def usage_pump(redis: Redis, keys: Keys, member: str = "m1") -> Pump[Final]:
    settler = Settler(redis, keys, member)
    return Pump(readers(redis, keys, member)[0], Final, settler.check, settler.commit)


def outcome_pump(redis: Redis, keys: Keys) -> Pump[Outcome]:
    return Pump(readers(redis, keys, "m1")[1], Outcome, outcomes.check, outcomes.commit)


def put(redis: Redis, keys: Keys, *finals: Final) -> None:
    for f in finals:
        redis.xadd(keys.usage, {"f": encode(f)})


def drain(pump: Pump[Any]) -> int:
    total = 0
    while count := pump.turn():
        total += count
    return total


def test_m1_usage_is_settled_then_acknowledged_and_removed(redis: Redis, keys: Keys) -> None:
    tenant(), price()
    put(redis, keys, *(final() for _ in range(600)))
    assert drain(usage_pump(redis, keys)) == 600
    assert UsageRecord.objects.count() == 600 and balance("acme", "USD")[0] == -600 * COST
    assert redis.xlen(keys.usage) == 0
    assert redis.xpending(keys.usage, GROUP)["pending"] == 0
    assert reconcile() == []


def test_m1_delivered_twice_counts_once(redis: Redis, keys: Keys) -> None:
    tenant(), price()
    one = final()
    put(redis, keys, one, one)
    drain(usage_pump(redis, keys))
    put(redis, keys, one)
    drain(usage_pump(redis, keys))
    assert UsageRecord.objects.count() == 1 and balance("acme", "USD")[0] == -COST


def test_m1_what_failed_is_read_again_by_the_same_member(redis: Redis, keys: Keys) -> None:
    tenant(), price()
    pump = usage_pump(redis, keys)
    put(redis, keys, final(), final())
    real, failures = pump._commit, iter([ConnectionError("gone")])

    def flaky(batch: Sequence[Final]) -> None:
        for error in failures:
            raise error
        real(batch)

    pump._commit = flaky
    with pytest.raises(ConnectionError):
        pump.turn()
    assert redis.xpending(keys.usage, GROUP)["pending"] == 2
    assert not UsageRecord.objects.exists()
    pump.reader.behind = True
    drain(pump)
    assert UsageRecord.objects.count() == 2 and redis.xlen(keys.usage) == 0


def test_m1_a_dead_members_entries_are_taken_over(redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.metering.streams._STUCK_MS", 0)
    tenant(), price()
    put(redis, keys, *(final() for _ in range(5)))
    dead = GroupReader(redis, keys.usage, keys.set_aside("usage"), "f", "dead")
    assert len(dead.read(3, None)) == 3
    drain(usage_pump(redis, keys, "alive"))
    assert UsageRecord.objects.count() == 5 and redis.xlen(keys.usage) == 0


def test_m3_what_cannot_be_read_is_set_aside_and_blocks_nothing(redis: Redis, keys: Keys) -> None:
    tenant(), price()
    good = [final() for _ in range(3)]
    bad: list[tuple[dict[str, bytes], str]] = [
        ({"f": b"\xff\xfe"}, "Error"),
        ({"f": encode([1, 2, 3])}, "ValidationError"),
        ({"other": b"x"}, "Error"),
        ({"f": encode(final(cached_tokens=101))}, "cached"),
        ({"f": encode(final(tenant="nobody"))}, "unknown tenant: nobody"),
    ]
    put(redis, keys, good[0])
    for fields, _ in bad[:3]:
        redis.xadd(keys.usage, fields)  # type: ignore[arg-type]
    put(redis, keys, good[1])
    for fields, _ in bad[3:]:
        redis.xadd(keys.usage, fields)  # type: ignore[arg-type]
    put(redis, keys, good[2])
    drain(usage_pump(redis, keys))
    assert UsageRecord.objects.count() == 3 and redis.xlen(keys.usage) == 0
    aside: Any = redis.xrange(keys.set_aside("usage"))
    reasons = sorted(fields[b"reason"].decode() for _, fields in aside)
    assert len(reasons) == 5
    for _, reason in bad:
        assert any(reason in x for x in reasons), (reason, reasons)
    assert {k for _, fields in aside for k in fields} == {b"reason", b"id", b"f", b"other"}


def test_m3_what_was_set_aside_can_be_put_back(redis: Redis, keys: Keys) -> None:
    price()
    tenant("someone")
    pump = usage_pump(redis, keys)
    put(redis, keys, final())
    drain(pump)
    assert redis.xlen(keys.set_aside("usage")) == 1
    tenant()
    assert pump.reader.restore_aside() == 1 and redis.xlen(keys.set_aside("usage")) == 0
    drain(pump)
    assert UsageRecord.objects.count() == 1


def test_m3_a_batch_the_database_refuses_is_halved_down_to_the_one(redis: Redis, keys: Keys) -> None:
    tenant(), price()
    poison = request_id()
    pump = usage_pump(redis, keys)
    real, sizes = pump._commit, []

    def refuse(batch: Sequence[Final]) -> None:
        sizes.append(len(batch))
        if any(f.request == poison for f in batch):
            raise DataError("out of range")
        real(batch)

    pump._commit = refuse
    put(redis, keys, *(final() for _ in range(20)), final(poison), *(final() for _ in range(43)))
    drain(pump)
    assert UsageRecord.objects.count() == 63 and redis.xlen(keys.set_aside("usage")) == 1
    assert sizes[0] == 64 and len(sizes) == 13


def test_m4_a_group_that_vanished_is_made_anew_from_the_start(redis: Redis, keys: Keys) -> None:
    tenant(), price()
    pump = usage_pump(redis, keys)
    put(redis, keys, final())
    drain(pump)
    redis.delete(keys.usage)  # Redis lost everything
    put(redis, keys, final(), final())
    drain(pump)
    assert UsageRecord.objects.count() == 3


def test_the_price_class_survives_the_loss_of_the_card(redis: Redis, keys: Keys) -> None:
    tenant(), price("small"), price("default", output_nano_per_mtok=0)
    redis.set(keys.card("tiny"), encode(card(price_class="small")))
    put(redis, keys, final())
    drain(usage_pump(redis, keys))
    assert ServedModel.objects.get().price_class == "small"
    redis.delete(keys.card("tiny"))
    put(redis, keys, final())
    drain(usage_pump(redis, keys, "after a restart"))
    redis.set(keys.card("tiny"), b"garbage")
    put(redis, keys, final())
    drain(usage_pump(redis, keys, "after another"))
    assert UsageRecord.objects.count() == 3
    assert {row.money for row in UsageRecord.objects.all()} == {COST}


def test_outcomes_become_rows_with_the_verdict_of_the_targets_in_force(redis: Redis, keys: Keys) -> None:
    owner = tenant()
    project = services.create_project(ACTOR, owner, "default", "Default")
    key = services.issue_key(ACTOR, project, "laptop").key
    before = request_id()
    services.update_tier(ACTOR, owner.tier, ttft_ms=100)
    after = request_id()
    sent = [outcome(before, key=key.public_id), outcome(after), outcome(after, ttft_s=9.0), outcome(tier="unknown")]
    for o in sent:
        redis.xadd(keys.outcomes, {"o": encode(o)})
    redis.xadd(keys.outcomes, {"o": encode(outcome(ttft_s=float("nan")))})
    drain(outcome_pump(redis, keys))
    rows = {row.request_id.hex: row for row in RequestOutcome.objects.all()}
    assert len(rows) == 3
    assert (rows[before].ttft_target_ms, rows[before].good) == (2000, True)
    assert (rows[after].ttft_target_ms, rows[after].ttft_met, rows[after].ttft_s) == (100, False, 0.5)
    assert redis.xlen(keys.set_aside("outcomes")) == 1
    key.refresh_from_db()
    assert key.last_used_at == rows[before].received_at


def test_refusals_count_once_whatever_is_read_again(redis: Redis, keys: Keys) -> None:
    at_ms = 1_790_000_000_000
    for n in range(25):
        refusal = Refusal(request_id(), "acme", "k", "batch", "tiny", 429, f"code{n % 2}", at_ms + n)
        redis.xadd(keys.refusals, {"r": encode(refusal)})
    redis.xadd(keys.refusals, {"r": b"junk"})
    assert tally(redis, keys) == 26
    assert tally(redis, keys) == 0
    assert dict(RefusalTally.objects.values_list("code", "count")) == {"code0": 13, "code1": 12}
    assert DirtyMinute.objects.count() == 1
    assert StreamCursor.objects.get().last_id == redis.xinfo_stream(keys.refusals)["last-generated-id"].decode()


@pytest.mark.django_db(transaction=True)
def test_m4_the_loop_outlives_a_database_that_is_away(
    redis: Redis, keys: Keys, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant(), price()
    pump, stop, failed = usage_pump(redis, keys), threading.Event(), threading.Event()

    def notice(self: object, stop: threading.Event) -> None:
        failed.set()
        stop.wait(0.05)

    monkeypatch.setattr("gateway.metering.pump.Backoff.wait", notice)
    thread = threading.Thread(target=pump.run, args=(stop,))
    with away(postgres_url):
        thread.start()
        put(redis, keys, *(final() for _ in range(10)))
        assert failed.wait(20)
        assert redis.xlen(keys.usage) == 10
    await_events(redis, keys, Kind.CLOSED, 10)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert UsageRecord.objects.count() == 10 and redis.xlen(keys.usage) == 0
