"""Real engine processes (simulated backend), a real server, and a gateway's side of the protocol to drive them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from engine.protocol.functions import Admission, Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import Delta, Final, ModelCard, Sampling, Work, decode, encode

ROOT = Path(__file__).parents[2]


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class EngineProcess:
    """One `python -m engine.serve`, its log in a file."""

    def __init__(self, url: str, prefix: str, pool: str, name: str, folder: Path, arguments: tuple[str, ...]) -> None:
        self.name, self.log_path = name, folder / f"{name}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "engine.serve", "--pool", pool, "--id", name, "--backend", "simulated"]
        command += ["--redis-url", url, "--prefix", prefix, "--log-level", "debug", *arguments]
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=self._log, stdout=self._log)

    @property
    def log(self) -> list[dict[str, Any]]:
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) if line.startswith("{") else {"event": "?", "line": line} for line in lines]

    def events(self) -> list[str]:
        return [line["event"] for line in self.log]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 15.0) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        self._log.close()


@dataclass
class Answer:
    """What a gateway has put together of one request."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.deltas) and self.deltas[-1].last

    def tokens(self, choice: int = 0) -> list[int]:
        """Checks that the indexes have no gap and no repetition."""
        ids: list[int] = []
        for d in self.deltas:
            if d.choice == choice:
                assert d.start == len(ids) or not d.tokens, f"gap or repetition at {d.start}, have {len(ids)}"
                ids += d.tokens
        return ids

    def text(self, choice: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.choice == choice)


class Gateway:
    """Admits requests and reads their replies, as a gateway does."""

    def __init__(self, redis: Redis, prefix: str, pool: str, name: str = "gw-1") -> None:
        self.redis: Any = redis
        self.keys, self.pool, self.name = Keys(prefix), pool, name
        self.functions = Functions(redis, self.keys)
        self.answers: dict[str, Answer] = {}
        self._last = b"0"
        self.functions.renew(name, 60_000)

    def card(self) -> ModelCard:
        raw = self.redis.get(self.keys.card(self.pool))
        assert raw is not None
        return decode(raw, ModelCard)

    def send(self, request: str, prompt: str = "hello", *, tier: str = "standard", n: int = 1, **sampling: Any) -> None:
        rank = {"interactive": 0, "standard": 1, "batch": 2}[tier]
        tokens = tuple(prompt.encode())
        work = Work(
            request, self.pool, tier, rank, "alpha", self.name, "completion", "", (tokens,),
            Sampling(**{"max_tokens": 20, "temperature": 0.0, **sampling}), n, 7, wall_ms(), 500, 100,
        )  # fmt: skip
        admission = Admission(
            request=request, tenant="alpha", pool=self.pool, tier=tier, tier_rank=rank, gateway=self.name, generation=1,
            hold_nano=100, floor_nano=None, max_concurrent=-1, max_queued_tier=-1, max_queued_tenant=-1, choices=n,
            prompt_tokens=len(tokens), lease_ms=60_000,
        )  # fmt: skip
        verdict = self.functions.admit(admission, encode(work))
        assert verdict.ok, verdict
        self.answers[request] = Answer()

    def read(self, until: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Read replies until the condition holds."""
        end = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < end, f"not in {timeout_s} s: { {k: v.done for k, v in self.answers.items()} }"
            found = self.redis.xread({self.keys.replies(self.name): self._last}, block=50)
            for _, entries in found or []:
                for entry, fields in entries:
                    self._last = entry
                    for delta in decode(fields[b"d"], list[Delta]):
                        if delta.request in self.answers:
                            self.answers[delta.request].deltas.append(delta)

    def finish(self, *requests: str, timeout_s: float = 10.0) -> None:
        wanted = requests or tuple(self.answers)
        self.read(lambda: all(self.answers[r].done for r in wanted), timeout_s)

    def finals(self) -> dict[str, Final]:
        """All usage records; fails on a second one for a request."""
        found: dict[str, Final] = {}
        for _, fields in self.redis.xrange(self.keys.usage):
            final = decode(fields[b"f"], Final)
            assert final.request not in found, f"two finals of {final.request}"
            found[final.request] = final
        return found

    def final(self, request: str, timeout_s: float = 5.0) -> Final:
        wait_for(lambda: request in self.finals(), timeout_s)
        return self.finals()[request]

    def state(self, request: str) -> str | None:
        raw = self.redis.hget(self.keys.request(request), "state")
        return raw.decode() if raw else None


def wait_for(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not in {timeout_s} s"
        time.sleep(0.01)


StartEngine = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def ready(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with an engine that answers at once, for all tests of a module that need nothing else."""
    redis, prefix = Redis.from_url(redis_url), f"t{secrets.token_hex(6)}:"
    simulate = ("--simulate", "decode_tps=0,prefill_tps=0")
    engine = EngineProcess(redis_url, prefix, "demo", "e0", tmp_path_factory.mktemp("engine"), simulate)
    wait_for(lambda: redis.zscore(Keys(prefix).engines("demo"), "e0") is not None, 15)
    yield Gateway(redis, prefix, "demo")
    engine.stop()
    redis.delete(*redis.scan_iter(match=f"{prefix}*", count=1000))
    redis.close()


@pytest.fixture
def start(redis_url: str, redis_prefix: str, redis: Redis, tmp_path: Path) -> Iterator[StartEngine]:
    """Start an engine and wait until it is registered: `start("e1", simulate="…", pool="demo")`."""
    engines: list[EngineProcess] = []

    def run(
        name: str = "e1", *arguments: str, simulate: str = "decode_tps=0,prefill_tps=0", ready: bool = True
    ) -> EngineProcess:
        engine = EngineProcess(redis_url, redis_prefix, "demo", name, tmp_path, ("--simulate", simulate, *arguments))
        engines.append(engine)
        if ready:
            key = Keys(redis_prefix).engines("demo")
            wait_for(lambda: redis.zscore(key, name) is not None or engine.process.poll() is not None, 15)
            assert engine.process.poll() is None, engine.log
        return engine

    yield run
    for engine in engines:
        engine.stop()


@pytest.fixture
def gateway(redis: Redis, redis_prefix: str) -> Gateway:
    return Gateway(redis, redis_prefix, "demo")
