"""A real data plane for tests: uvicorn, engine processes, a database of its own. Postgres and Valkey: see conftest."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psycopg
import redis

ROOT = Path(__file__).resolve().parents[1]
POOL = "sim"
"""Name of the simulated model."""


class Process:
    """A child of ours with its output in a file."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as out:
            self.child = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    def stop(self, how: int = signal.SIGTERM, timeout_s: float = 10) -> int:
        if self.child.poll() is None:
            self.child.send_signal(how)
        try:
            return self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.child.kill()
            raise

    def fail_if_dead(self) -> None:
        if self.child.poll() is not None:
            raise RuntimeError(f"exit status {self.child.returncode}:\n{self.log.read_text()[-4000:]}")


class Stack:
    """Everything between a client's socket and an engine, over given servers."""

    def __init__(self, folder: Path, postgres_url: str, redis_url: str) -> None:
        self.folder, self.redis_url = folder, redis_url
        self.prefix = f"stack{secrets.token_hex(4)}:"
        name = f"stack_{secrets.token_hex(4)}"
        with psycopg.connect(postgres_url, autocommit=True) as server:
            server.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
        base, _, query = postgres_url.partition("?")
        self.database_url = f"{base.rpartition('/')[0]}/{name}" + (f"?{query}" if query else "")
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "gateway.settings",
            "DATABASE_URL": self.database_url,
            "REDIS_URL": redis_url,
            "SLUICE_REDIS_PREFIX": self.prefix,
            "SLUICE_LOG_LEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
        }
        self.redis = redis.Redis.from_url(redis_url)
        self.processes: list[Process] = []
        self.keys: dict[str, str] = {}

    # -- parts --------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Tables, and the tenants of `tests/seed.py`."""
        self.django("migrate", "-v", "0")
        self.keys = json.loads(self.python("-m", "tests.seed").splitlines()[-1])

    def django(self, *arguments: str) -> str:
        return self.python("-m", "django", *arguments)

    def python(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return done.stdout

    def change(self, code: str) -> str:
        """Run a change of the record in a process of its own."""
        start = "import django; django.setup(); from tenants import services; from tenants.audit import Actor; "
        names = "from tenants.models import *; actor = Actor('test'); "
        return self.python("-c", start + names + code)

    def gateway(self, *arguments: str, **environment: str) -> Gateway:
        """A data plane; it answers when this returns."""
        running = Gateway(self, arguments, {**self.environment, **environment})
        self.processes.append(running.process)
        running.wait()
        return running

    def engine(self, simulate: str = "", pool: str = POOL, **options: str) -> Process:
        """An engine of the simulated backend; registered when this returns."""
        arguments = ["-m", "engine.serve", "--pool", pool, "--backend", "simulated", "--drain-seconds", "1"]
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}", value]
        if simulate:
            arguments += ["--simulate", simulate]
        key, before = f"{self.prefix}engines:{pool}", set()
        before = set(self.redis.zrange(key, 0, -1))
        running = Process(f"engine-{len(self.processes)}", arguments, self.environment, self.folder)
        self.processes.append(running)
        ends = time.monotonic() + 60
        while not set(self.redis.zrange(key, 0, -1)) - before:
            running.fail_if_dead()
            if time.monotonic() > ends:
                raise TimeoutError(running.log.read_text()[-4000:])
            time.sleep(0.02)
        return running

    def stop(self) -> None:
        for process in reversed(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.stop()
        for key in self.redis.scan_iter(match=f"{self.prefix}*", count=1000):
            self.redis.delete(key)
        self.redis.close()


class Gateway:
    """One running data plane."""

    def __init__(self, stack: Stack, more: Sequence[str], environment: dict[str, str]) -> None:
        self.stack = stack
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        arguments = ["-m", "uvicorn", "gateway.asgi:data", "--port", str(self.port), *(more or ["--no-access-log"])]
        arguments += ["--timeout-graceful-shutdown", "2", "--http", "gateway.api.protocol:JsonErrors"]
        self.process = Process(f"gateway-{len(stack.processes)}", arguments, environment, stack.folder)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def wait(self) -> None:
        ends = time.monotonic() + 30
        while True:
            self.process.fail_if_dead()
            if time.monotonic() > ends:
                raise TimeoutError(self.process.log.read_text()[-4000:])
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/healthz", timeout=2).raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.05)

    def client(self, tenant: str = "alpha", **options: Any) -> httpx.Client:
        key = self.stack.keys[tenant]
        return httpx.Client(base_url=self.base, headers={"Authorization": f"Bearer {key}"}, timeout=30, **options)

    def async_client(self, tenant: str = "alpha", **options: Any) -> httpx.AsyncClient:
        key = self.stack.keys[tenant]
        return httpx.AsyncClient(base_url=self.base, headers={"Authorization": f"Bearer {key}"}, timeout=30, **options)


@contextlib.contextmanager
def stack(folder: Path, postgres_url: str, redis_url: str) -> Iterator[Stack]:
    """A prepared stack, stopped at the end."""
    made = Stack(folder, postgres_url, redis_url)
    try:
        made.prepare()
        yield made
    finally:
        made.stop()


def events(body: str) -> list[Any]:
    """The data of a well-formed event stream, `[DONE]` left out (it must be there)."""
    assert body.endswith("\n\n")
    data = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
    for line in body.split("\n"):
        assert not line or line.startswith(("data: ", ":")), line
    if data[-1] == "[DONE]":
        data.pop()
    return [json.loads(d) for d in data]
