"""Supervised processes: started, watched, restarted with back-off, stopped in stages, their logs kept small."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gateway.local.lifeline import kill_group

__all__ = ["Process", "Spec", "Supervisor", "describe_exit", "ended", "rotate"]

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A process that lived this long starts its back-off anew."""
LOG_BYTES_MAX = 10 * 1024 * 1024
LOGS_KEPT = 3


@dataclass(frozen=True, slots=True)
class Spec:
    """How to run one process. `prepare` may block and runs in a thread; `start` spawns, in the main thread only."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    stage: int
    """Stages stop in ascending order; within one, all at once."""
    stop_steps: tuple[tuple[int, float], ...]
    log: Path
    prepare: Callable[[], None] | None = None
    hopeless: frozenset[int] = frozenset()
    """Exit statuses that starting again won't change; before the stack is ready they end the attempt."""


@dataclass(slots=True)
class Process:
    """One supervised process now: starting, running, restarting or stopped."""

    spec: Spec
    child: subprocess.Popen[bytes] | None = None
    state: str = "starting"
    restarts: int = 0
    failures: int = 0
    """Consecutive short lives; sets the back-off."""
    started_at: float = field(default_factory=time.time)
    due: float = 0.0

    def describe(self) -> dict[str, object]:
        pid = self.child.pid if self.child and self.state == "running" else None
        since_ms = int(self.started_at * 1000)
        return {
            "name": self.spec.name,
            "pid": pid,
            "state": self.state,
            "restarts": self.restarts,
            "started_ms": since_ms,
            "log": str(self.spec.log),
        }


def describe_exit(code: int | None) -> str:
    """ "exit status 1" or "SIGKILL"."""
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def rotate(log: Path) -> None:
    """Move a full log aside. Its writer keeps the file open for appending, so the file is copied and emptied."""
    try:
        if log.stat().st_size < LOG_BYTES_MAX:
            return
        for number in range(LOGS_KEPT - 1, 0, -1):
            older = log.with_name(f"{log.name}.{number}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{number + 1}"))
        shutil.copy2(log, log.with_name(f"{log.name}.1"))
        with log.open("r+b") as file:
            file.truncate(0)
    except OSError:
        # A full disk mustn't take the supervisor down with it; the next round tries again.
        return


class Supervisor:
    """Keeps processes running until told to stop. One task, in the main thread."""

    def __init__(self, note: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._note, self._changed = note, changed
        self.processes: dict[str, Process] = {}
        self.stopping = False

    def add(self, spec: Spec) -> Process:
        """Spawn (`prepare` has run) and watch from now on."""
        process = self.processes[spec.name] = Process(spec)
        self._spawn(process)
        return process

    async def watch(self) -> None:
        """Restart what ends; rotate logs. Runs until cancelled."""
        rounds = 0
        while True:
            for process in list(self.processes.values()):
                if not self.stopping:
                    await self._tend(process)
            rounds += 1
            if rounds % 50 == 0:
                for process in self.processes.values():
                    rotate(process.spec.log)
            await asyncio.sleep(0.1)

    async def _tend(self, process: Process) -> None:
        if process.state == "running" and process.child is not None and process.child.poll() is not None:
            self._schedule(process)
        elif process.state == "restarting" and time.monotonic() >= process.due:
            try:
                if process.spec.prepare is not None:
                    await asyncio.to_thread(process.spec.prepare)
                if self.stopping:
                    return
                self._spawn(process)
                process.restarts += 1
                self._note(f"{process.spec.name} restarted")
                self._changed()
            except Exception as error:  # whatever it is, the other processes must stay watched
                self._note(f"{process.spec.name} can't be restarted: {error}")
                self._back_off(process)

    def _spawn(self, process: Process) -> None:
        process.child = process.spec.start()
        process.state, process.started_at = "running", time.time()
        self._changed()

    def _schedule(self, process: Process) -> None:
        assert process.child is not None  # noqa: S101  (only a running process ends)
        kill_group(process.child.pid)
        if time.time() - process.started_at > HEALTHY_AFTER_S:
            process.failures = 0
        delay_s = self._back_off(process)
        self._note(
            f"{process.spec.name} ended ({describe_exit(process.child.returncode)}); restarting in {delay_s:.1f} s, "
            f"see {process.spec.log}"
        )
        self._changed()

    def _back_off(self, process: Process) -> float:
        delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**process.failures)
        process.failures += 1
        process.state, process.due = "restarting", time.monotonic() + delay_s
        return delay_s

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop all, stage by stage. When `hurry` is set, SIGKILL instead of patience."""
        self.stopping = True
        for stage in sorted({p.spec.stage for p in self.processes.values()}):
            group = [p for p in self.processes.values() if p.spec.stage == stage]
            await asyncio.gather(*(self._stop_one(p, hurry) for p in group))
            self._changed()

    async def _stop_one(self, process: Process, hurry: asyncio.Event) -> None:
        child = process.child
        if child is not None:
            for number, patience_s in process.spec.stop_steps:
                if await _signalled(child, number, patience_s, hurry):
                    break
            else:
                if not hurry.is_set():
                    self._note(f"{process.spec.name} did not stop in time; killed")
            kill_group(child.pid)
            child.wait()
        process.state = "stopped"


async def ended(child: subprocess.Popen[bytes]) -> None:
    """Wait for a child. Polled: a watcher thread per child could outlive the loop, and signals belong to the stack."""
    while child.poll() is None:  # noqa: ASYNC110  (nothing sets an event when a process ends)
        await asyncio.sleep(0.02)


async def _signalled(child: subprocess.Popen[bytes], number: int, patience_s: float, hurry: asyncio.Event) -> bool:
    """Send a signal and wait; True when the process has ended."""
    if child.poll() is None:
        child.send_signal(number)
    waits = {asyncio.create_task(ended(child)), asyncio.create_task(hurry.wait())}
    await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return child.poll() is not None
