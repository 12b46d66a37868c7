"""Cancels, engine deaths and restarts all at once: every request ends once, whatever happens, and nothing is left."""

from __future__ import annotations

import random
import signal
import time

import pytest
from redis import Redis

from engine.protocol.messages import Final, Timeline, encode
from tests.serve.conftest import EngineProcess, Gateway, StartEngine, wait_for, wall_ms

SIMULATE = "decode_tps=40,prefill_tps=0,rows=6"


def settle_lost(gateway: Gateway, finished: set[str]) -> None:
    """What a gateway does when it is told that an engine was lost: finish with the raised epoch."""
    for request, answer in gateway.answers.items():
        if request in finished or not answer.done or answer.deltas[-1].code != "engine_lost":
            continue
        epoch = answer.deltas[-1].epoch
        tokens = len(answer.tokens())
        final = Final(
            request, epoch, "demo", "standard", "alpha", "", "lost", 5, 0, tokens, 0, 0.0, 0.0, Timeline(), wall_ms()
        )
        assert gateway.functions.finish(request, epoch, encode(final))
        finished.add(request)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_once(start: StartEngine, gateway: Gateway, redis: Redis, seed: int) -> None:
    rng = random.Random(seed)
    engines: dict[str, EngineProcess] = {name: start(name, simulate=SIMULATE) for name in ("e1", "e2")}
    cancelled_queued: set[str] = set()
    finished: set[str] = set()
    next_reap = kill_at = time.monotonic()
    kill_at += 2.0
    for i in range(60):
        gateway.send(
            f"r{i:02}",
            max_tokens=rng.randint(1, 60),
            n=rng.choice((1, 1, 2)),
            tier=rng.choice(("interactive", "batch")),
        )
        if rng.random() < 0.3:
            victim = f"r{rng.randint(0, i):02}"
            if gateway.functions.cancel(victim, "client_gone").was == "queued":
                cancelled_queued.add(victim)
        if time.monotonic() >= next_reap:
            gateway.functions.reap()
            next_reap = time.monotonic() + 0.9
        if time.monotonic() >= kill_at:
            name = rng.choice(sorted(engines))
            engines[name].signal(signal.SIGKILL)
            engines[name].wait()
            engines[name] = start(name, simulate=SIMULATE)
            kill_at = time.monotonic() + 2.0
        gateway.read(lambda: True)
        time.sleep(rng.random() * 0.1)

    def over() -> bool:
        nonlocal next_reap
        if time.monotonic() >= next_reap:
            gateway.functions.reap()
            next_reap = time.monotonic() + 0.9
        settle_lost(gateway, finished)
        return all(a.done for r, a in gateway.answers.items() if r not in cancelled_queued)

    gateway.read(over, timeout_s=60)
    wanted = set(gateway.answers) - cancelled_queued
    wait_for(lambda: set(gateway.finals()) == wanted)
    for request, final in gateway.finals().items():
        answer = gateway.answers[request]
        delivered = sum(len(answer.tokens(choice)) for choice in {d.choice for d in answer.deltas})
        assert final.completion_tokens == delivered or final.reason == "lost", request
    keys = gateway.keys
    left = (
        keys.open_by_tenant("alpha"),
        keys.engine_requests("e1"),
        keys.engine_requests("e2"),
        keys.gateway_requests("gw-1"),
    )
    assert [key for key in left if redis.exists(key)] == []
    assert redis.hgetall(keys.depth("demo")) == {}
    assert not redis.keys(keys.queue("demo", "*", "*"))
    assert int(redis.hget(keys.account("alpha"), "held") or 0) == 100 * len(wanted), "held until they are settled"
    for request in wanted:
        gateway.functions.close(request, "alpha", None, 0)
    assert not redis.hexists(keys.account("alpha"), "held")
    assert not redis.keys(keys.request("*"))
