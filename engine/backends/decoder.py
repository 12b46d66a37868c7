"""Decoding strangers' images where it can do no harm: in processes that may be killed, off the step thread."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from queue import PriorityQueue
from typing import IO, Final, cast

from engine.backends.pixels import CPU_SECONDS, MEMORY_BYTES

__all__ = ["Decoder", "DecoderError", "Seen"]

_WALL_SECONDS: Final = 30.0
"""On a machine so busy that the CPU time takes longer, decoding has failed as well."""
_START_SECONDS: Final = 30.0
_REASON_BYTES: Final = 1000
"""More than any reason against an image is long."""

Seen = Callable[[tuple[bytes, ...], str, str], None]
"""Called with the pixels of all images, or with none, a code and the reason why there are none."""


class DecoderError(RuntimeError):
    """There is no process to decode in. Says nothing about the image."""


class _Job:
    """The images of one request. The first that fails ends it."""

    def __init__(self, images: tuple[bytes, ...], done: Seen, wanted: Callable[[], bool]) -> None:
        self.images, self.done, self.wanted = images, done, wanted
        self.over = False
        self._pixels: list[bytes] = [b""] * len(images)
        self._left = len(images)
        self._lock = threading.Lock()

    def finished(self, index: int, pixels: bytes) -> None:
        with self._lock:
            self._pixels[index] = pixels
            self._left -= 1
            last = not self.over and not self._left
            self.over = self.over or last
        if last:
            self.done(tuple(self._pixels), "", "")

    def failed(self, index: int, code: str, reason: str) -> None:
        with self._lock:
            told, self.over = self.over, True
        if not told:
            which = f"image {index}: " if len(self.images) > 1 else ""
            self.done((), code, which + reason)


class Decoder:
    """Threads with a child process each. Images of better tiers go first, then those of earlier requests."""

    def __init__(self, settings: Mapping[str, int], workers: int) -> None:
        self._queue: PriorityQueue[tuple[int, int, int, _Job | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._children = [_Child(settings) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(child,), name="decoder", daemon=True) for child in self._children
        ]
        for thread in self._threads:
            thread.start()

    def decode(self, images: tuple[bytes, ...], rank: int, done: Seen, wanted: Callable[[], bool]) -> None:
        """Start on a request's images; `done` is called once, from another thread, while they are `wanted`."""
        job, number = _Job(images, done, wanted), next(self._numbers)
        for index in range(len(images)):
            self._queue.put((rank, number, index, job))

    def close(self) -> None:
        """End the threads and their processes; what still waits is never told."""
        for _ in self._threads:
            self._queue.put((-1, next(self._numbers), 0, None))
        for child in self._children:
            child.kill()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _run(self, child: _Child) -> None:
        while True:
            *_, index, job = self._queue.get()
            if job is None:
                child.stop()
                return
            if job.over or not job.wanted():
                continue
            try:
                pixels, reason = child.pixels(job.images[index])
            except Exception as error:
                job.failed(index, "engine_error", f"no image can be decoded here: {error}")
                continue
            if reason:
                job.failed(index, "invalid_image", reason)
            else:
                job.finished(index, pixels)


class _Child:
    """A process that decodes, one image at a time. Starts on first use, and again after it had to be killed."""

    def __init__(self, settings: Mapping[str, int]) -> None:
        self._settings = json.dumps(dict(settings))
        self._pixels_bytes = settings["height"] * settings["width"] * 3
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Over a start and `kill`: what is started afterwards would outlive us."""
        self._killed = False

    def pixels(self, image: bytes) -> tuple[bytes, str]:
        """The pixels, or none and the reason against it. Raises `DecoderError`."""
        process = self._process
        if process is None or process.poll() is not None:
            self.stop()
            process = self._start()
        try:
            deadline = time.monotonic() + _WALL_SECONDS
            _write(process, len(image).to_bytes(4, "big") + image, deadline)
            head = _read(process, 5, deadline)
            answer = _read(process, self._length(head), deadline)
            return (b"", answer.decode()) if head[0] else (answer, "")
        except (OSError, EOFError, ValueError):
            # Killed by the kernel for its limits, out of our patience, or a stranger's image speaks through it.
            self.stop()
            if self._killed:
                raise DecoderError("the engine stops") from None
            return b"", f"it takes more than {CPU_SECONDS} s or {MEMORY_BYTES >> 20} MiB to decode"

    def _length(self, head: bytes) -> int:
        """Of the answer after this head. Raises ValueError for one that no sound process gives."""
        status, length = head[0], int.from_bytes(head[1:], "big")
        if (status == 0 and length == self._pixels_bytes) or (status == 1 and 0 < length <= _REASON_BYTES):
            return length
        raise ValueError(f"status {status} and {length} bytes")

    def kill(self) -> None:
        """From another thread: what is under way fails at once, and nothing is started any more."""
        with self._lock:
            self._killed = True
            if (process := self._process) is not None:
                process.kill()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                cast("IO[bytes]", pipe).close()

    def _start(self) -> subprocess.Popen[bytes]:
        # No secrets in its environment: it reads what strangers send.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "engine.backends.pixels", self._settings]
        with self._lock:
            if self._killed:
                raise DecoderError("the engine stops")
            try:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            except OSError as error:
                raise DecoderError(str(error)) from error
            self._process = process
        os.set_blocking(cast("IO[bytes]", process.stdin).fileno(), False)
        try:
            _read(process, 1, time.monotonic() + _START_SECONDS)
        except (OSError, EOFError):
            self.stop()
            raise DecoderError(f"its process ended with status {process.returncode}") from None
        return process


def _write(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    """All of it. Raises OSError when it ended, EOFError when it did not read in time."""
    handle = cast("IO[bytes]", process.stdin).fileno()
    poll = select.poll()
    poll.register(handle, select.POLLOUT)
    left = memoryview(data)
    while left:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise EOFError
        left = left[os.write(handle, left) :]


def _read(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
    """So many bytes of its answer. Raises EOFError when it ended or took too long."""
    handle = cast("IO[bytes]", process.stdout).fileno()
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    data = bytearray()
    while len(data) < count:
        readable = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        chunk = os.read(handle, count - len(data)) if readable else b""
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
