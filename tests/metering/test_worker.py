"""The metering worker as the process it is: `python -m django settle` against real servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from psycopg.conninfo import conninfo_to_dict
from redis.client import Redis

from engine.protocol.events import Kind
from engine.protocol.functions import Admission, Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import Refusal, encode
from gateway.metering.models import RefusalTally, RequestOutcome
from gateway.metering.worker import Worker
from tenants.billing import services
from tenants.billing.models import UsageRecord
from tenants.billing.reconcile import reconcile
from tenants.billing.selectors import balance, load_balance_nano
from tests.billing.build import ACTOR, COST, final, outcome, price, request_id, tenant
from tests.metering.servers import PATIENCE_S, await_events, away, card

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def keys(redis_prefix: str) -> Keys:
    return Keys(redis_prefix)


class Process:
    """A worker that is surely gone when the test is over."""

    def __init__(self, keys: Keys, log: Path) -> None:
        parts = conninfo_to_dict(os.environ["DATABASE_URL"]) | {"dbname": connection.settings_dict["NAME"]}
        url = "postgresql://{user}:{password}@/{dbname}?host={host}".format(**parts)
        environment = os.environ | {"DATABASE_URL": url, "SLUICE_REDIS_PREFIX": keys.prefix}
        command = [sys.executable, "-m", "django", "settle"]
        self.log = log
        with log.open("ab") as file:
            self.child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        return self.child.wait(PATIENCE_S)


@pytest.fixture
def start(keys: Keys, tmp_path: Path) -> Iterator[Callable[[], Process]]:
    running: list[Process] = []

    def begin() -> Process:
        running.append(Process(keys, tmp_path / "settle.log"))
        return running[-1]

    yield begin
    for process in running:
        if process.child.poll() is None:
            process.end(signal.SIGKILL)
    connection.close()


def await_live(redis: Redis, keys: Keys, seen: Callable[[], bool]) -> None:
    """Look again at each snapshot the worker publishes."""
    with redis.pubsub() as listener:
        listener.subscribe(keys.live)
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, "not seen in time"
            listener.get_message(timeout=1)


def test_a_request_from_its_hold_to_its_last_record(redis: Redis, keys: Keys, start: Callable[[], Process]) -> None:
    acme, _ = tenant(billing="prepaid", floor=0), price()
    services.top_up(ACTOR, acme, Decimal(1), "wire")
    functions = Functions(redis, keys)
    functions.account("acme", acme.generation, *load_balance_nano("acme"))
    assert functions.register("tiny", "e1", "h1", encode(card()), 60_000) == "ok"
    request = request_id()
    order = Admission(
        request=request, tenant="acme", pool="tiny", tier="interactive", tier_rank=0, gateway="g1", generation=1,
        hold_nano=1_000_000, floor_nano=0, max_concurrent=1, max_queued_tier=9, max_queued_tenant=9, choices=1,
        prompt_tokens=100, lease_ms=60_000,
    )  # fmt: skip
    assert functions.admit(order, b"work").ok
    assert functions.pull("tiny", "e1", {"interactive": 1}, 60_000).works
    assert functions.finish(request, 0, encode(final(request)))
    assert redis.hget(keys.account("acme"), "held") == b"1000000"
    redis.xadd(keys.outcomes, {"o": encode(outcome(request))})
    refusal = Refusal(
        request_id(), "acme", "k", "interactive", "tiny", 429, "concurrency_limit", int(time.time() * 1000)
    )
    redis.xadd(keys.refusals, {"r": encode(refusal)})
    worker = start()
    settled = await_events(redis, keys, Kind.SETTLED, 1)[0]
    assert (settled.request, settled.attributes["money"]) == (request, f"{COST:f}00000000")
    await_events(redis, keys, Kind.CLOSED, 1)
    account: Any = redis.hgetall(keys.account("acme"))
    assert b"held" not in account and account[b"balance"] == b"%d" % (10**9 - 20_500)
    assert not redis.exists(keys.request(request))
    await_live(redis, keys, lambda: RequestOutcome.objects.exists() and RefusalTally.objects.exists())
    assert RequestOutcome.objects.get().good and UsageRecord.objects.get().pk == RequestOutcome.objects.get().pk
    assert redis.xlen(keys.usage) == redis.xlen(keys.outcomes) == 0
    began = time.monotonic()
    assert worker.end() == 0
    assert time.monotonic() - began < 5


def test_killed_and_started_again_it_settles_everything_once(
    redis: Redis, keys: Keys, start: Callable[[], Process]
) -> None:
    tenant(), price()
    finals = [final() for _ in range(3000)]
    pipe = redis.pipeline(transaction=False)
    for f in finals:
        pipe.xadd(keys.usage, {"f": encode(f)})
    pipe.execute()
    worker = start()
    await_events(redis, keys, Kind.SETTLED, 1)
    worker.end(signal.SIGKILL)
    done = UsageRecord.objects.count()
    assert 0 < done < 3000
    start()
    await_live(redis, keys, lambda: redis.xlen(keys.usage) == 0)
    assert UsageRecord.objects.count() == 3000
    assert balance("acme", "USD")[0] == -3000 * COST
    assert reconcile() == []


def test_postgres_and_redis_away_and_back(
    redis: Redis, keys: Keys, start: Callable[[], Process], postgres_url: str
) -> None:
    tenant(), price()
    worker = start()
    redis.xadd(keys.usage, {"f": encode(final())})
    await_events(redis, keys, Kind.CLOSED, 1)
    with away(postgres_url):
        for _ in range(20):
            redis.xadd(keys.usage, {"f": encode(final())})
        redis.client_kill_filter(_type="normal", skipme=True)
        deadline = time.monotonic() + PATIENCE_S
        while "usage waits" not in worker.log.read_text():  # it noticed
            assert time.monotonic() < deadline and worker.child.poll() is None
            time.sleep(0.05)
        assert redis.xlen(keys.usage) == 20
    await_events(redis, keys, Kind.CLOSED, 21)
    assert UsageRecord.objects.count() == 21 and reconcile() == []
    redis.delete(keys.usage, keys.events)  # Redis lost everything, groups included
    redis.xadd(keys.usage, {"f": encode(final())})
    await_events(redis, keys, Kind.CLOSED, 1)
    assert UsageRecord.objects.count() == 22
    assert worker.end(signal.SIGINT) == 0


def test_state_of_another_layout_stops_it_before_it_reads_a_record(
    redis: Redis, keys: Keys, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.SLUICE_REDIS_PREFIX = keys.prefix
    redis.set(keys.layout, "999")
    redis.xadd(keys.usage, {"f": b"whatever it means there"})
    assert Worker().run() == 1
    assert "has layout 999" in caplog.text
    assert redis.xlen(keys.usage) == 1 and len(redis.keys(f"{keys.prefix}*")) == 2
