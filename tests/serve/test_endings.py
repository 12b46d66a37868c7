"""How requests and engines end: cancel, expiry, faults, drain, death, and Redis going away."""

from __future__ import annotations

import signal
import time

import pytest
from redis import Redis

from engine.protocol.functions import Admission, Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import Control, Sampling, Work, encode
from tests.serve.conftest import Answer, Gateway, StartEngine, wait_for, wall_ms

SLOW = "decode_tps=20,prefill_tps=0"


def running(gateway: Gateway, request: str) -> None:
    """Wait until the request has sent its first tokens."""
    gateway.read(lambda: any(d.tokens for d in gateway.answers[request].deltas))


def arm(gateway: Gateway) -> None:
    """The detector has been watching for longer than a lease."""
    now = wall_ms()
    gateway.redis.hset(gateway.keys.tick, mapping={"at": now, "armed": now - 1})


def test_cancel_of_a_running_request_takes_effect_within_a_second(start: StartEngine, gateway: Gateway) -> None:
    start(simulate=SLOW)
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    at = time.monotonic()
    assert gateway.functions.cancel("r1", "client_gone").was == "running"
    final = gateway.final("r1")
    assert time.monotonic() - at < 1.0
    gateway.finish("r1")
    assert final.reason == "abort"
    assert final.completion_tokens == len(gateway.answers["r1"].tokens()) > 0
    assert gateway.answers["r1"].deltas[-1].finish == "abort"


def test_cancel_of_a_queued_request_leaves_nothing(start: StartEngine, gateway: Gateway) -> None:
    start(simulate="decode_tps=20,prefill_tps=0,rows=1")
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    gateway.send("r2")
    assert gateway.functions.cancel("r2", "client_gone").was == "queued"
    assert gateway.state("r2") is None
    assert gateway.redis.hget(gateway.keys.account("alpha"), "held") == b"100"
    gateway.functions.cancel("r1", "client_gone")
    gateway.final("r1")
    assert list(gateway.finals()) == ["r1"]


def test_an_expired_request_is_told(start: StartEngine, gateway: Gateway) -> None:
    engine = start(simulate=SLOW)
    engine.signal(signal.SIGSTOP)
    work = Work(
        "r1", "demo", "standard", 1, "alpha", "gw-1", "completion", "", ((104,),), Sampling(max_tokens=3), 1, 1,
        wall_ms(), 500, 100, expires_ms=wall_ms() + 50,
    )  # fmt: skip
    gateway.functions.admit(
        Admission("r1", "alpha", "demo", "standard", 1, "gw-1", 1, 100, None, -1, -1, -1, 1, 1, 60_000), encode(work)
    )
    gateway.answers["r1"] = Answer()
    time.sleep(0.1)  # the deadline itself
    engine.signal(signal.SIGCONT)
    gateway.finish("r1")
    assert [(d.finish, d.code, d.last) for d in gateway.answers["r1"].deltas] == [("error", "queue_timeout", True)]
    final = gateway.final("r1")
    assert (final.reason, final.prompt_tokens, final.completion_tokens) == ("expired", 0, 0)


def test_a_fault_of_one_sequence_ends_only_that(start: StartEngine, gateway: Gateway) -> None:
    engine = start(simulate="decode_tps=200,prefill_tps=0,fail_after=5,on=poison")
    gateway.send("bad", "poison", max_tokens=30)
    gateway.send("good", "fine", max_tokens=30)
    gateway.finish()
    assert gateway.answers["bad"].deltas[-1].code == "engine_fault"
    assert (gateway.final("bad").reason, gateway.final("bad").completion_tokens) == ("error", 5)
    assert (gateway.final("good").reason, gateway.final("good").completion_tokens) == ("length", 30)
    assert engine.process.poll() is None


def test_a_crash_of_the_step_ends_the_batch_and_the_process(start: StartEngine, gateway: Gateway) -> None:
    engine = start(simulate="decode_tps=100,prefill_tps=0,crash_after=5,on=poison")
    gateway.send("good", "fine", max_tokens=300)
    running(gateway, "good")
    gateway.send("bad", "poison", max_tokens=300)
    gateway.finish()
    assert engine.wait() == 70
    for request in ("good", "bad"):
        assert gateway.answers[request].deltas[-1].code == "engine_fault"
        assert gateway.final(request).reason == "error"
        assert gateway.final(request).completion_tokens == len(gateway.answers[request].tokens())
    assert gateway.redis.zcard(gateway.keys.engines("demo")) == 0


@pytest.mark.parametrize("by", ["signal", "control"])
def test_a_drain_lets_running_requests_end(start: StartEngine, gateway: Gateway, by: str) -> None:
    engine = start(simulate="decode_tps=50,prefill_tps=0,rows=1")
    gateway.send("r1", max_tokens=40)
    running(gateway, "r1")
    gateway.send("r2")
    if by == "signal":
        engine.signal()
    else:
        gateway.redis.xadd(gateway.keys.control("e1"), {"c": encode(Control("drain"))})
    gateway.finish("r1")
    assert engine.wait() == 0
    assert gateway.final("r1").completion_tokens == 40
    assert gateway.state("r2") == "queued", "a draining engine takes no new work"
    assert gateway.redis.zscore(gateway.keys.engines("demo"), "e1") is None


def test_a_drain_has_a_limit(start: StartEngine, gateway: Gateway) -> None:
    engine = start("e1", "--drain-seconds", "0.3", simulate=SLOW)
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    engine.signal()
    assert engine.wait() == 0
    gateway.finish("r1")
    assert gateway.answers["r1"].deltas[-1].code == "engine_draining"
    final = gateway.final("r1")
    assert (final.reason, final.completion_tokens) == ("abort", len(gateway.answers["r1"].tokens()))


def test_a_second_signal_ends_at_once(start: StartEngine, gateway: Gateway) -> None:
    engine = start(simulate=SLOW)
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    engine.signal()
    wait_for(lambda: "draining" in engine.events())
    engine.signal()
    assert engine.wait(2.0) == 128 + signal.SIGTERM


def test_death_is_told_to_the_gateway_within_three_seconds(start: StartEngine, gateway: Gateway) -> None:
    engine = start(simulate=SLOW)
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    arm(gateway)
    engine.signal(signal.SIGKILL)
    at = time.monotonic()
    ticks = [at]

    def told() -> bool:
        if time.monotonic() >= ticks[-1] + 0.9:  # as the metering worker does, about once a second
            ticks.append(time.monotonic())
            gateway.functions.reap()
        return gateway.answers["r1"].done

    gateway.read(told)
    assert time.monotonic() - at < 3.0
    delta = gateway.answers["r1"].deltas[-1]
    assert (delta.finish, delta.code, delta.epoch, delta.last) == ("error", "engine_lost", 1, True)
    assert gateway.state("r1") == "lost"
    assert not gateway.functions.finish("r1", 0, b"\x90"), "the dead engine's epoch is shut out"


def test_a_restart_under_the_same_id_loses_what_it_had(start: StartEngine, gateway: Gateway) -> None:
    engine = start(simulate=SLOW)
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    engine.signal(signal.SIGKILL)
    engine.wait()
    start(simulate=SLOW)
    gateway.finish("r1")
    assert gateway.answers["r1"].deltas[-1].code == "engine_lost"


def test_an_engine_that_only_slept_stops_what_it_lost(start: StartEngine, gateway: Gateway) -> None:
    engine = start("e1", "--lease-ms", "500", simulate=SLOW)
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    arm(gateway)
    engine.signal(signal.SIGSTOP)
    wait_for(lambda: gateway.functions.reap().lost == ("r1",))
    engine.signal(signal.SIGCONT)
    wait_for(lambda: engine.events().count("registered") == 2)
    wait_for(lambda: "requests_abandoned" in engine.events())
    assert gateway.finals() == {}, "its gateway owns the end of it"
    gateway.send("r2", max_tokens=3)
    gateway.finish("r2")


def test_a_dead_gateway_has_its_requests_stopped(start: StartEngine, gateway: Gateway) -> None:
    start(simulate=SLOW)
    gateway.send("r1", max_tokens=1000)
    running(gateway, "r1")
    arm(gateway)
    gateway.redis.zadd(gateway.keys.gateways, {"gw-1": 1})
    assert gateway.functions.reap().aborted == ("r1",)
    final = gateway.final("r1")
    assert final.reason == "abort" and final.completion_tokens > 0
    assert gateway.redis.exists(gateway.keys.replies("gw-1")) == 0, "the engine makes no stream for the dead"


def wipe(redis: Redis, prefix: str) -> None:
    """All of the installation's data is gone (other tests share the server, so no FLUSHALL)."""
    keys = list(redis.scan_iter(match=f"{prefix}*", count=1000))
    redis.delete(*keys)


def test_a_wiped_redis_costs_no_usage(start: StartEngine, gateway: Gateway, redis: Redis, redis_prefix: str) -> None:
    engine = start(simulate="decode_tps=40,prefill_tps=0")
    gateway.send("before", max_tokens=3)
    gateway.finish("before")
    gateway.send("during", max_tokens=80)
    running(gateway, "during")
    gateway.final("before")
    wait_for(lambda: redis.exists(gateway.keys.era))
    wipe(redis, redis_prefix)
    wait_for(lambda: engine.events().count("registered") == 2)
    assert redis.exists(gateway.keys.card("demo"))
    assert gateway.final("during", 10).completion_tokens == 80
    assert gateway.final("before").completion_tokens == 3, "told again, in case it was not settled before"
    gateway.functions.renew("gw-1", 60_000)
    gateway.send("after", max_tokens=3)
    gateway.finish("after")
    assert engine.process.poll() is None


def test_another_card_is_refused_with_a_sentence(start: StartEngine, gateway: Gateway) -> None:
    start("e1")
    other = start("e2", "--model-name", "something-else", ready=False)
    assert other.wait() == 3
    assert any("another model card" in line.get("detail", "") for line in other.log)
    assert gateway.redis.zrange(gateway.keys.engines("demo"), 0, -1) == [b"e1"]


def test_unreadable_work_is_dead_at_once_and_stops_nothing(start: StartEngine, gateway: Gateway) -> None:
    start()
    gateway.functions.admit(
        Admission("bad", "alpha", "demo", "standard", 1, "gw-1", 1, 100, None, -1, -1, -1, 1, 1, 60_000), b"\xc1"
    )
    gateway.answers["bad"] = Answer()
    gateway.send("good")
    gateway.finish()
    assert gateway.answers["bad"].deltas[-1].code == "bad_work"
    assert gateway.final("bad").reason == "error"


def test_a_lost_answer_to_a_pull_is_recovered(start: StartEngine, gateway: Gateway, redis: Redis) -> None:
    """Another connection takes the work in the engine's name: what a reset between function and answer looks like."""
    engine = start("e1", simulate=SLOW)
    engine.signal(signal.SIGSTOP)
    gateway.send("r1", max_tokens=3)
    assert len(Functions(redis, Keys(gateway.keys.prefix)).pull("demo", "e1", {"standard": 1}).works) == 1
    engine.signal(signal.SIGCONT)
    gateway.finish("r1")
    assert "recovered_work" in engine.events()
    assert gateway.final("r1").completion_tokens == 3
