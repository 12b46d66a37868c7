"""A stack of its own data folder and ports, driven through the `sluice` command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from openai import AsyncOpenAI, OpenAI

SLUICE = (sys.executable, "-m", "gateway.cli")
OF_THE_TESTS = ("SLUICE_", "DATABASE_URL", "REDIS_URL", "DJANGO_")


def clean_environment() -> dict[str, str]:
    """Ours without what the test session set for in-process tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith(OF_THE_TESTS)}


def free_ports(count: int) -> list[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


@dataclass
class Stack:
    """Up, down and everything in between of one data folder."""

    data_dir: Path
    backend: str = "causal_lm"
    port: int = 0
    console_port: int = 0
    credentials: dict[str, Any] = field(default_factory=dict)
    more: dict[str, str] = field(default_factory=dict)
    """Environment of the commands beside the clean one."""
    options: tuple[str, ...] = ()
    """More arguments of `up`."""

    def arguments(self) -> list[str]:
        if not self.port:
            self.port, self.console_port = free_ports(2)
        ports = ["--port", str(self.port), "--console-port", str(self.console_port)]
        return [*ports, "--data-dir", str(self.data_dir), "--backend", self.backend, *self.options]

    def up(self) -> dict[str, Any]:
        """`sluice up --detach`; its one JSON line."""
        done = sluice("up", "--detach", *self.arguments(), **self.more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1, done.stdout
        self.credentials = json.loads(done.stdout)
        return self.credentials

    def foreground(self) -> subprocess.Popen[str]:
        """`sluice up` as at a terminal; returns at once."""
        return subprocess.Popen(
            [*SLUICE, "up", *self.arguments()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment() | self.more,
        )

    def down(self) -> None:
        done = sluice("down", "--data-dir", str(self.data_dir))
        assert done.returncode == 0, done.stderr

    def status(self) -> dict[str, Any]:
        done = sluice("status", "--json", "--data-dir", str(self.data_dir))
        return dict(json.loads(done.stdout))

    def pid(self, name: str) -> int | None:
        """None while it is down."""
        processes = json.loads((self.data_dir / "state.json").read_text())["processes"]
        return next(p["pid"] for p in processes if p["name"] == name)  # type: ignore[no-any-return]

    def key(self, tenant: str = "alpha") -> str:
        return str(self.credentials["tenants"][tenant]["key"])

    def client(self, tenant: str = "alpha") -> OpenAI:
        return OpenAI(base_url=self.credentials["api_base"], api_key=self.key(tenant), max_retries=0, timeout=120)

    def async_client(self, tenant: str = "alpha") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.credentials["api_base"], api_key=self.key(tenant), max_retries=0, timeout=120)

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Ask the stack's own database."""
        url = json.loads((self.data_dir / "environment.json").read_text())["DATABASE_URL"]
        with psycopg.connect(url) as connection:
            return connection.execute(query, parameters).fetchall()

    def processes(self) -> set[int]:
        """Every process, of whatever parent, that works for this data folder."""
        return set(_processes_of(str(self.data_dir)))

    def kill_all(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def sluice(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLUICE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        env=clean_environment() | environment,
    )


def _processes_of(data_dir: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            said = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
            if data_dir.encode() in said and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                yield int(entry.name)
        except OSError:
            continue


def until(condition: Any, timeout_s: float, what: str) -> Any:
    """Poll an outside process until `condition()` is true; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
