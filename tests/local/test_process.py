"""The supervisor over small real processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.local import process as process_module
from gateway.local.lifeline import spawn
from gateway.local.process import Spec, Supervisor, rotate


def _spec(name: str, script: str, folder: Path, stage: int = 1, patience_s: float = 5.0) -> Spec:
    log = folder / f"{name}.log"

    def start() -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-S", "-c", script], env=dict(os.environ), log=log)

    return Spec(name, start, stage, ((signal.SIGTERM, patience_s),), log)


SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


async def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (the supervisor sets no event for tests)
            await asyncio.sleep(0.01)


async def test_a_child_that_dies_is_restarted_and_named(tmp_path: Path) -> None:
    notes: list[str] = []
    supervisor = Supervisor(notes.append, lambda: None)
    process = supervisor.add(_spec("sleeper", SLEEPER, tmp_path))
    watch = asyncio.create_task(supervisor.watch())
    assert process.child is not None
    first = process.child.pid
    process.child.kill()
    await _until(lambda: process.restarts == 1)
    assert process.child.pid != first and process.state == "running"
    assert notes[0].startswith("sleeper ended (SIGKILL); restarting in 0.5 s")
    assert notes[1] == "sleeper restarted"
    await supervisor.stop(asyncio.Event())
    watch.cancel()
    assert process.child.poll() is not None


async def test_back_off_grows_while_a_child_keeps_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "BACKOFF_FIRST_S", 0.05)
    notes: list[str] = []
    supervisor = Supervisor(notes.append, lambda: None)
    process = supervisor.add(_spec("failing", "raise SystemExit(3)", tmp_path))
    watch = asyncio.create_task(supervisor.watch())
    await _until(lambda: process.failures >= 4)
    await supervisor.stop(asyncio.Event())
    watch.cancel()
    waits = [float(n.split("restarting in ")[1].split(" s")[0]) for n in notes if "exit status 3" in n]
    assert waits[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4], abs=0.051)
    assert waits == sorted(waits)


async def test_stages_stop_in_order_and_a_deaf_child_is_killed(tmp_path: Path) -> None:
    order = tmp_path / "order"
    polite = (
        "import signal, sys, time\n"
        f"def bye(*_):\n    open({str(order)!r}, 'a').write(sys.argv[0] + NAME)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    notes: list[str] = []
    supervisor = Supervisor(notes.append, lambda: None)
    for name, stage in (("last", 3), ("first", 1)):
        supervisor.add(_spec(name, polite.replace("NAME", repr(name + " ")), tmp_path, stage))
    supervisor.add(_spec("deaf", deaf, tmp_path, 2, patience_s=0.2))
    names = ("first", "deaf", "last")
    await _until(lambda: all("up" in (tmp_path / f"{n}.log").read_text() for n in names))
    await supervisor.stop(asyncio.Event())
    assert order.read_text().replace("-c", "") == "first last "
    assert any("deaf did not stop in time" in n for n in notes)
    assert all(p.child is not None and p.child.poll() is not None for p in supervisor.processes.values())


async def test_hurry_kills_at_once(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    supervisor = Supervisor(lambda _: None, lambda: None)
    supervisor.add(_spec("deaf", deaf, tmp_path, patience_s=600))
    await _until(lambda: "up" in (tmp_path / "deaf.log").read_text())
    hurry = asyncio.Event()
    hurry.set()
    async with asyncio.timeout(5):
        await supervisor.stop(hurry)


def test_a_killed_supervisor_leaves_no_child(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys, time\nfrom pathlib import Path\nfrom gateway.local.lifeline import spawn\n"
        f"command = [sys.executable, '-S', '-c', {SLEEPER!r}]\n"
        "child = spawn(command, env=dict(os.environ), log=Path(sys.argv[1]) / 'log')\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    handle = os.pidfd_open(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    assert select.select([handle], [], [], 5)[0], "the child outlived its supervisor"
    os.close(handle)


def test_full_logs_are_moved_aside_while_the_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "LOG_BYTES_MAX", 100)
    log = tmp_path / "x.log"
    with log.open("ab", buffering=0) as writer:
        for number in range(6):
            writer.write(f"{number}".encode() * 120)
            rotate(log)
            assert log.stat().st_size == 0
        writer.write(b"after")
    assert log.read_bytes() == b"after"
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert (tmp_path / "x.log.1").read_bytes() == b"5" * 120
