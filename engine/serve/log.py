"""One JSON line per thing worth knowing, on standard error. Never the text of a prompt or an answer."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import IO, Any

import msgspec

__all__ = ["Log"]

_LEVELS = ("debug", "info", "warning", "error")


class Log:
    """Structured log of one process. Safe to use from several threads."""

    def __init__(self, level: str = "info", stream: IO[str] | None = None, **common: Any) -> None:
        self._least = _LEVELS.index(level)
        self._stream = stream if stream is not None else sys.stderr
        self._common = common
        self._lock = threading.Lock()

    def debug(self, event: str, **fields: Any) -> None:
        self._write(0, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(1, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(2, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(3, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if level < self._least:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        line = msgspec.json.encode({"at": stamp, "level": _LEVELS[level], "event": event, **self._common, **fields})
        with self._lock, contextlib.suppress(OSError):  # a full disk stops the log, not the engine
            self._stream.write(line.decode() + "\n")
            self._stream.flush()
