"""The loop that carries a stream into Postgres: read, check, commit, acknowledge. It outlasts absent servers."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec
from django.db import DatabaseError, DataError, IntegrityError, connection
from redis.exceptions import RedisError

from engine.protocol.messages import decode
from gateway.metering.streams import Entry, GroupReader

__all__ = ["Backoff", "Pump"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_BATCH = 256
_BLOCK_MS = 500
_GATHER_S = 0.2
"""Pause after a batch that was not full: a transaction costs about as much for ten messages as for one, and what comes
meanwhile shares the next. A message that comes after a pause is committed at once."""


class Backoff:
    """Growing, jittered waits, 0.1 s to 5 s."""

    def __init__(self) -> None:
        self._next_s = 0.1

    def reset(self) -> None:
        self._next_s = 0.1

    def wait(self, stop: threading.Event) -> None:
        stop.wait(self._next_s * random.uniform(0.8, 1.2))
        self._next_s = min(5.0, self._next_s * 2)


class Pump(Generic[T]):
    """Messages of one type from one stream. `check` raises ValueError for a message that contradicts itself;
    `commit` makes a batch durable (and may be given the same message again)."""

    def __init__(
        self, reader: GroupReader, kind: type[T], check: Callable[[T], object], commit: Callable[[Sequence[T]], None]
    ) -> None:
        self.reader, self._kind, self._check, self._commit = reader, kind, check, commit

    def run(self, stop: threading.Event) -> None:
        """Until `stop`; the batch in hand is finished first."""
        backoff = Backoff()
        while not stop.is_set():
            try:
                if 0 < self.turn(_BLOCK_MS) < _BATCH:
                    stop.wait(_GATHER_S)
                backoff.reset()
            except Exception as error:
                # Whatever failed, the entries are still pending: wait, then begin with them again (M4).
                expected = isinstance(error, RedisError | DatabaseError | OSError)
                log.log(
                    logging.WARNING if expected else logging.ERROR,
                    "%s waits: %s: %s",
                    self.reader.stream,
                    type(error).__name__,
                    str(error).strip(),
                    exc_info=None if expected else error,
                )
                self.reader.behind = True
                connection.close()
                backoff.wait(stop)
        self._finish()

    def turn(self, block_ms: int = 0) -> int:
        """One batch; returns how many entries were read. `block_ms` of 0 doesn't wait."""
        entries = self.reader.read(_BATCH, block_ms or None)
        good: list[tuple[Entry, T]] = []
        for entry in entries:
            try:
                message = decode(entry.payload or b"", self._kind)
                self._check(message)
            except (msgspec.MsgspecError, ValueError) as error:
                self._set_aside(entry, error)
            else:
                good.append((entry, message))
        if good:
            self._settle(good)
        return len(entries)

    def _settle(self, good: Sequence[tuple[Entry, T]]) -> None:
        """Commit, then acknowledge. A batch the database refuses is halved until the one record is alone."""
        try:
            self._commit([message for _, message in good])
        except (DataError, IntegrityError, ValueError) as error:
            if len(good) == 1:
                self._set_aside(good[0][0], error)
                return
            middle = len(good) // 2
            self._settle(good[:middle])
            self._settle(good[middle:])
        else:
            self.reader.done([entry for entry, _ in good])

    def _set_aside(self, entry: Entry, error: Exception) -> None:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        log.error("%s entry %s set aside: %s", self.reader.stream, entry.id.decode(), reason)
        self.reader.set_aside(entry, reason)

    def _finish(self) -> None:
        try:
            self.reader.leave()
        except RedisError as error:
            log.debug("left without a word: %s", error)
        connection.close()
