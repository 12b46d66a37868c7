"""The live view, made of the real queue: what waits, runs, was promised and was kept. Unknown figures are null."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from django.db import connection
from redis.client import Redis

from engine.protocol.events import Event, Kind
from engine.protocol.functions import Admission, Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import encode
from frontend.snapshot import read
from gateway.metering import outcomes
from gateway.metering.live import Live
from gateway.metering.marks import mark
from gateway.metering.tasks import roll_up
from tenants.billing.settle import settle
from tests.billing.build import COST, final, outcome, price, request_id, tenant
from tests.metering.servers import card, heartbeat

pytestmark = pytest.mark.django_db


@pytest.fixture
def keys(redis_prefix: str) -> Keys:
    return Keys(redis_prefix)


def now_ms() -> int:
    return int(time.time() * 1000)


def admit(functions: Functions, slug: str, tier: str, rank: int) -> str:
    request = request_id()
    order = Admission(
        request=request, tenant=slug, pool="tiny", tier=tier, tier_rank=rank, gateway="g1", generation=1, hold_nano=0,
        floor_nano=None, max_concurrent=-1, max_queued_tier=-1, max_queued_tenant=-1, choices=1, prompt_tokens=5,
        lease_ms=60_000,
    )  # fmt: skip
    assert functions.admit(order, b"work").ok
    return request


def life(slug: str, tier: str, ttft_s: float, tokens: int, stream: bool = True) -> list[Event]:
    request, at = request_id(), now_ms()
    who = ("g1", slug, tier, "tiny")
    return [
        Event(request, Kind.RECEIVED.value, at - 900, 0.0, *who, {"stream": stream}),
        Event(request, Kind.ADMITTED.value, at - 900, ttft_s / 4, *who),
        Event(request, Kind.PULLED.value, at - 900, 5.0, "e1", slug, tier, "tiny"),  # another process's clock
        Event(request, Kind.FIRST_SENT.value, at - 500, 3 * ttft_s / 4, *who),
        Event(request, Kind.LAST_SENT.value, at, 0.5, *who, {"tokens": tokens}),
    ]


def by_name(snapshot: dict[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    lines = {line["tier"]: line for line in snapshot["tiers"]}
    return lines, {(t, x["tenant"]): x for t, line in lines.items() for x in line["tenants"]}


def test_an_empty_house_shows_its_tiers_and_no_invented_figures(redis: Redis, keys: Keys) -> None:
    tenant()
    snapshot = Live(redis, keys).snapshot(now_ms())
    assert [(x["tier"], x["rank"], x["ttft_target_ms"]) for x in snapshot["tiers"]] == [
        ("interactive", 0, 2000),
        ("standard", 1, 8000),
        ("batch", 2, 60000),
    ]
    line = snapshot["tiers"][0]
    assert (line["queued"], line["running"], line["tenants"]) == (0, 0, [])
    unknown = ("oldest_wait_s", "tokens_per_s", "ttft_p95_ms", "compliance", "money", "currency")
    assert {line[name] for name in unknown} == {None}
    assert snapshot["engines"] == [] and snapshot["events_lag_ms"] == 0 and snapshot["window_s"] == 60


def test_what_waits_and_what_runs_is_read_from_the_queue_itself(redis: Redis, keys: Keys) -> None:
    tenant(), tenant("umbrella", tier=2)
    functions = Functions(redis, keys)
    assert functions.register("tiny", "e1", "h1", encode(card()), 60_000) == "ok"
    redis.set(keys.engine("e1"), encode(heartbeat(at_ms=now_ms() - 250)))
    admit(functions, "umbrella", "batch", 2)
    assert len(functions.pull("tiny", "e1", {"batch": 1}, 60_000).works) == 1
    for _ in range(3):
        admit(functions, "acme", "interactive", 0)
    admit(functions, "umbrella", "batch", 2)
    later = now_ms() + 2000
    snapshot = Live(redis, keys).snapshot(later)
    tiers, tenants = by_name(snapshot)
    assert (tiers["interactive"]["queued"], tiers["interactive"]["running"]) == (3, 0)
    assert (tenants["batch", "umbrella"]["queued"], tenants["batch", "umbrella"]["running"]) == (1, 1)
    assert 2.0 <= tenants["interactive", "acme"]["oldest_wait_s"] < 10
    assert tiers["standard"]["oldest_wait_s"] is None
    engine = snapshot["engines"][0]
    assert (engine["engine"], engine["kv_free"], engine["by_tier"]) == ("e1", 40, {"batch": 1})
    assert 2000 <= engine["age_ms"] < 10_000


def test_first_tokens_come_from_the_events_of_the_window(redis: Redis, keys: Keys) -> None:
    tenant(), tenant("umbrella")
    for ttft_s in (0.1, 0.2, 0.4):
        redis.xadd(keys.events, {"e": encode(life("acme", "interactive", ttft_s, 60))})
    redis.xadd(keys.events, {"e": encode(life("umbrella", "interactive", 1.0, 120))})
    redis.xadd(keys.events, {"e": encode(life("umbrella", "interactive", 5.0, 120, stream=False))})
    redis.xadd(keys.events, {"e": b"junk"})
    live = Live(redis, keys)
    for _ in range(2):  # reading again counts nothing twice
        tiers, tenants = by_name(live.snapshot(now_ms()))
    assert tenants["interactive", "acme"]["ttft_p95_ms"] == pytest.approx(400)
    assert tiers["interactive"]["ttft_p95_ms"] == pytest.approx(1000)
    assert tiers["interactive"]["tokens_per_s"] == pytest.approx(420 / 60)
    assert tenants["interactive", "acme"]["requests"] == 3
    tiers, _ = by_name(live.snapshot(now_ms() + 61_000))
    assert tiers["interactive"]["ttft_p95_ms"] is None and tiers["interactive"]["tokens_per_s"] is None


def test_money_and_compliance_come_from_the_record_before_and_after_the_rollup(redis: Redis, keys: Keys) -> None:
    tenant(), price()
    ids = [request_id() for _ in range(4)]
    settle([final(r) for r in ids], {}, mark)
    outcomes.commit([outcome(r, ttft_s=9.0 if r == ids[0] else 0.1, total_s=0.2) for r in ids])
    live = Live(redis, keys)
    for done in (False, True):
        if done:
            assert roll_up() >= 1
        snapshot = live.snapshot(now_ms())
        tiers, tenants = by_name(snapshot)
        assert tiers["interactive"]["money"] == tenants["interactive", "acme"]["money"] == f"{4 * COST:f}00000000"
        assert tiers["interactive"]["currency"] == "USD"
        assert 0 <= snapshot["at_ms"] - snapshot["money_since_ms"] < 86_400_000
        assert tiers["interactive"]["compliance"] == 0.75


def test_without_postgres_the_queue_is_still_shown_and_the_rest_is_null(
    redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant()
    live = Live(redis, keys)
    live.snapshot(now_ms())
    functions = Functions(redis, keys)
    functions.register("tiny", "e1", "h1", encode(card()), 60_000)
    admit(functions, "acme", "interactive", 0)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE metering_requestoutcome RENAME TO away")
    monkeypatch.setattr(connection, "close", lambda: None)
    tiers, tenants = by_name(live.snapshot(now_ms()))
    assert tenants["interactive", "acme"]["queued"] == 1
    assert tiers["interactive"]["money"] is None and tiers["interactive"]["compliance"] is None


def test_a_snapshot_is_kept_for_seconds_and_pushed(redis: Redis, keys: Keys) -> None:
    tenant()
    with redis.pubsub() as listener:
        listener.subscribe(keys.live)
        listener.get_message(timeout=5)
        sent = Live(redis, keys).publish()
        pushed = listener.get_message(timeout=5)
    assert pushed is not None and pushed["data"] == sent == redis.get(keys.live)
    assert orjson.loads(sent)["tiers"][0]["tier"] == "interactive"
    assert [line.tier for line in read(sent).tiers] == ["interactive", "standard", "batch"]  # as the console reads it
    assert 0 < redis.pttl(keys.live) <= 10_000
