"""Requests that admissions hand to a waiting engine: none is lost, doubled or left running, whatever breaks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from redis import Redis

from engine.protocol.functions import Handed
from engine.protocol.messages import Sampling, Work, decode
from engine.serve.link import Arrived, Cancelled, Link
from tests.serve.conftest import Gateway, StartEngine, wait_for

SLOW = "decode_tps=20,prefill_tps=0,rows=8"


def stands(gateway: Gateway, *engines: str) -> None:
    for engine in engines:
        wait_for(lambda engine=engine: gateway.redis.zscore(gateway.keys.standing("demo"), engine) is not None)  # type: ignore[misc]
        wait_for(lambda engine=engine: gateway.redis.pubsub_numsub(gateway.keys.hand(engine))[0][1] >= 1)  # type: ignore[misc]


def send_until(gateway: Gateway, name: str, done: Callable[[str], bool]) -> str:
    """The first request of which that holds when it was admitted: a busy machine may keep an engine from its pulls for
    longer than they stand, and then requests are queued."""
    for number in range(100):
        request = f"{name}{number}"
        stands(gateway, "e1")
        gateway.send(request)
        if done(request):
            return request
        gateway.finish()
    raise AssertionError(f"none of {number + 1} requests")


def test_it_runs_before_anybody_pulls(start: StartEngine, gateway: Gateway) -> None:
    start("e1")
    ear = gateway.redis.pubsub()
    ear.subscribe(gateway.keys.hand("e1"))
    ear.get_message(timeout=5)

    def handed(request: str) -> bool:
        message = ear.get_message(timeout=0.2)
        return message is not None and decode(Handed.read(message["data"]).pulled.work, Work).request == request

    request = send_until(gateway, "r", handed)
    gateway.finish()
    assert gateway.final(request).completion_tokens == 20
    assert len(gateway.finals()) == len(gateway.answers)
    ear.close()


def test_engines_that_wait_share_the_work(start: StartEngine, gateway: Gateway) -> None:
    for engine in ("e1", "e2"):
        start(engine, simulate=SLOW)
    stands(gateway, "e1", "e2")
    for i in range(8):
        gateway.send(f"r{i}", max_tokens=5)
    gateway.finish()
    wait_for(lambda: len(gateway.finals()) == 8)
    assert {final.engine for final in gateway.finals().values()} == {"e1", "e2"}


def test_a_message_that_is_lost_is_found_again(start: StartEngine, gateway: Gateway) -> None:
    """The connection is cut in the transaction that published: what was on its way went with it."""
    engine = start("e1")
    execute = gateway.functions._ask

    def cut(*words: object) -> object:
        pipe = gateway.redis.pipeline(transaction=True)
        pipe.execute_command(*words)
        pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        return pipe.execute()[0]

    def recovered(request: str) -> bool:
        gateway.finish()
        return any(line["event"] == "recovered_work" and line["request"] == request for line in engine.log)

    gateway.functions._ask = cut
    request = send_until(gateway, "lost", recovered)
    gateway.functions._ask = execute
    assert gateway.final(request).completion_tokens == 20
    stands(gateway, "e1")  # it listens again
    gateway.send("after")
    gateway.finish()
    assert gateway.final("after").engine == "e1"


def test_a_killed_engine_swallows_nothing(start: StartEngine, gateway: Gateway) -> None:
    """What is admitted after its death, within its lease and its credit, waits for another one."""
    engine = start("e1")
    stands(gateway, "e1")
    engine.signal(signal.SIGKILL)
    engine.wait()
    wait_for(lambda: gateway.redis.pubsub_numsub(gateway.keys.hand("e1"))[0][1] == 0)
    gateway.send("r1")
    assert gateway.state("r1") == "queued"
    start("e2")
    gateway.finish()
    assert gateway.final("r1").engine == "e2"


def test_a_drain_loses_nothing_that_was_handed_over(start: StartEngine, gateway: Gateway, redis_url: str) -> None:
    """Requests come all the time while one engine after the other is drained and a new one started."""
    start("e0", simulate=SLOW)
    admitted = threading.Event()
    stop = threading.Event()
    client = Redis.from_url(redis_url)
    sender = Gateway(client, gateway.keys.prefix, "demo")

    def send() -> None:
        number = 0
        while not stop.is_set():
            sender.send(f"r{number:03}", max_tokens=1)
            admitted.set()
            number += 1
            time.sleep(0.01)

    thread = threading.Thread(target=send)
    thread.start()
    admitted.wait()
    for name in ("e1", "e2"):
        engine = start(name, simulate=SLOW)
        stands(gateway, name)
        wait_for(lambda name=name: any(f.engine == name for f in gateway.finals().values()), 15)  # type: ignore[misc]
        engine.signal()
        assert engine.wait() == 0
    stop.set()
    thread.join()
    sender.finish(timeout_s=30)
    wrong = {r: a.deltas[-1] for r, a in sender.answers.items() if a.deltas[-1].code}
    assert not wrong
    wait_for(lambda: len(sender.finals()) == len(sender.answers))
    assert {"e0", "e1", "e2"} == {final.engine for final in sender.finals().values()}
    client.close()


def test_a_cancel_waits_for_its_request() -> None:
    """They come by two connections, and the cancel may be first."""
    link = Link()
    link.cancel("r1", "client_gone")
    assert link.inbox.empty()
    assert link.arrive(_arrived("r1")) and not link.arrive(_arrived("r1"))
    link.cancel("r1", "again")
    items = [link.inbox.get_nowait() for _ in range(3)]
    assert isinstance(items[0], Arrived)
    assert items[1:] == [Cancelled("r1", "client_gone"), Cancelled("r1", "again")]
    assert link.inbox.empty() and not link.early


def test_what_was_handed_takes_from_the_offered_credit() -> None:
    link = Link()
    link.credit, link.tokens = {"standard": 3, "+": 1}, 10
    link.spend(_arrived("r1").work)
    assert (link.credit, link.tokens) == ({"standard": 2}, 6)
    link.tokens = 4
    link.spend(_arrived("r2").work)
    assert link.credit == {}


def _arrived(request: str) -> Arrived:
    work = Work(
        request, "demo", "standard", 1, "alpha", "gw-1", "completion", "", ((1, 2, 3, 4),), Sampling(max_tokens=1),
        1, 1, 0, 0, 0,
    )  # fmt: skip
    return Arrived(work, 0, b"")
