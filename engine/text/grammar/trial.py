"""Compiling a stranger's grammar where it can do no harm: in a process that may be killed."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from typing import IO, Final, cast

import msgspec

from engine.protocol.messages import ModelCard

__all__ = ["CPU_SECONDS", "MEMORY_BYTES", "Trial", "TrialError"]

CPU_SECONDS: Final = 2
MEMORY_BYTES: Final = 512 << 20
"""What one trial may take, beside what the process already holds. Enforced by the kernel."""
_WALL_SECONDS: Final = 15.0
"""On a machine so busy that the CPU time above takes longer, the trial failed as well."""
_START_SECONDS: Final = 30.0


class TrialError(RuntimeError):
    """The trial could not be held (no process, no memory for it). Says nothing about the grammar."""


class Trial:
    """A child process that compiles constraints for one model, one at a time. Starts on first use, and again after it
    had to be killed. Safe to use from several threads."""

    def __init__(self, card: ModelCard, *, cpu_seconds: int = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._card, self._cpu_seconds, self._memory_bytes = card, cpu_seconds, memory_bytes
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def refusal(self, constraint: str) -> str | None:
        """Why the constraint can't be enforced, or None. Raises `TrialError`."""
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                child = self._child = self._start()
            try:
                _send(child, msgspec.json.encode(constraint))
                answer = _line(child, _WALL_SECONDS)
            except OSError:
                answer = b""
            if not answer:  # killed by the kernel for its limits, or it ran out of our patience
                self._stop()
                return f"it takes more than {self._cpu_seconds} s or {self._memory_bytes >> 20} MiB to compile"
            reason: str = msgspec.json.decode(answer, type=str)
            return reason or None

    def close(self) -> None:
        """End the process. A later trial starts another."""
        child = self._child
        if child is not None:
            child.kill()  # also when a trial is under way: it fails at once
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # No secrets in its environment: it computes what strangers send.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "engine.text.grammar.child", str(self._cpu_seconds), str(self._memory_bytes)]
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            _send(child, msgspec.json.encode(self._card))
            ready = _line(child, _START_SECONDS)
        except OSError as error:
            raise TrialError(f"no process to try grammars in: {error}") from error
        if not ready:
            child.kill()
            _close(child)
            raise TrialError(f"the process to try grammars in ended with status {child.returncode}")
        return child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            _close(child)


def _close(child: subprocess.Popen[bytes]) -> None:
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            cast("IO[bytes]", pipe).close()


def _send(child: subprocess.Popen[bytes], line: bytes) -> None:
    pipe = cast("IO[bytes]", child.stdin)
    pipe.write(line + b"\n")
    pipe.flush()


def _line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """One line of its answer; empty when it ended or took too long."""
    handle = cast("IO[bytes]", child.stdout).fileno()
    poll = select.poll()  # not `select`: a gateway may have thousands of files open
    poll.register(handle, select.POLLIN)
    deadline, data = time.monotonic() + timeout_s, b""
    while not data.endswith(b"\n"):
        readable = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        chunk = os.read(handle, 65536) if readable else b""
        if not chunk:
            return b""
        data += chunk
    return data
