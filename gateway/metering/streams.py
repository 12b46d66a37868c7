"""Reading a stream as one of a group: every entry is handled by someone, and acknowledged only when it is done (M1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.client import Redis
from redis.exceptions import ResponseError

__all__ = ["GROUP", "Entry", "GroupReader"]

GROUP = "settlers"
_CLAIM_EVERY_S = 2.0
_STUCK_MS = 5_000
"""A reader that holds an entry this long is taken for dead; if it isn't, the entry is handled twice and counts once."""
_FORGET_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream; `payload` is None where the expected field is missing."""

    id: bytes
    payload: bytes | None
    fields: dict[bytes, bytes]


class GroupReader:
    """One member of the group of one stream. Not shared between threads."""

    def __init__(self, redis: Redis, stream: str, aside: str, field: str, member: str) -> None:
        # redis-py types every answer as a union over its decoding options; ours are bytes.
        self.redis: Any = redis
        self.stream, self.aside, self.member = stream, aside, member
        self._field = field.encode()
        self._claimed_at = 0.0
        self.behind = False
        """Set when handling failed: the next read begins with what was delivered before and not acknowledged."""

    def read(self, count: int, block_ms: int | None) -> list[Entry]:
        """Own unfinished entries first, then stuck ones of others, then new ones. Waits `block_ms` (None: not)."""
        try:
            return self._read(count, block_ms)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            # The stream is not there yet, or the group went with Redis: begin at the start, nothing may be skipped.
            self._create()
            return self._read(count, block_ms)

    def done(self, entries: Sequence[Entry]) -> None:
        """Acknowledge and remove. Only this removes entries: a length cap could cut off what nobody has read."""
        if entries:
            ids = [entry.id for entry in entries]
            pipe = self.redis.pipeline(transaction=True)
            pipe.xack(self.stream, GROUP, *ids)
            pipe.xdel(self.stream, *ids)
            pipe.execute()

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Move an entry that can't be handled where it blocks nobody, with the reason (M3)."""
        pipe = self.redis.pipeline(transaction=True)
        pipe.xadd(self.aside, {b"reason": reason.encode()[:500], b"id": entry.id, **entry.fields})
        pipe.xack(self.stream, GROUP, entry.id)
        pipe.xdel(self.stream, entry.id)
        pipe.execute()

    def restore_aside(self) -> int:
        """Put back everything that was set aside, after what was wrong has been mended. Returns how many."""
        restored = 0
        for entry_id, fields in self.redis.xrange(self.aside):
            own = {k: v for k, v in fields.items() if k not in {b"reason", b"id"}}
            pipe = self.redis.pipeline(transaction=True)
            pipe.xadd(self.stream, own or {b"empty": b""})
            pipe.xdel(self.aside, entry_id)
            pipe.execute()
            restored += 1
        return restored

    def leave(self) -> None:
        """Leave the group if nothing is unfinished, and remove members that are long gone."""
        for member in self.redis.xinfo_consumers(self.stream, GROUP):
            mine = member["name"] == self.member.encode()
            if member["pending"] == 0 and (mine or member["idle"] > _FORGET_MS):
                self.redis.xgroup_delconsumer(self.stream, GROUP, member["name"])

    def _create(self) -> None:
        try:
            self.redis.xgroup_create(self.stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _read(self, count: int, block_ms: int | None) -> list[Entry]:
        if self.behind:
            entries = self._fetch("0", count, None)
            if entries:
                return entries
            self.behind = False
        if time.monotonic() - self._claimed_at >= _CLAIM_EVERY_S:
            reply = self.redis.xautoclaim(self.stream, GROUP, self.member, _STUCK_MS, "0-0", count=count)
            if reply[1]:
                return [self._entry(*raw) for raw in reply[1]]
            self._claimed_at = time.monotonic()
        return self._fetch(">", count, block_ms)

    def _fetch(self, start: str, count: int, block_ms: int | None) -> list[Entry]:
        reply = self.redis.xreadgroup(GROUP, self.member, {self.stream: start}, count=count, block=block_ms)
        streams = reply.items() if isinstance(reply, dict) else reply or []
        # An entry that was deleted while it was pending comes back without fields: nothing is left to handle.
        return [self._entry(*raw) for _, entries in streams for raw in entries]

    def _entry(self, entry_id: bytes, fields: Any) -> Entry:
        fields = fields or {}
        return Entry(entry_id, fields.get(self._field), fields)
