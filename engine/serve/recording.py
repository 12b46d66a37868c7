"""A recording of one engine's scheduler: every request event and step outcome it was told of, and the plans it made.

Lines of JSON: `["recording", 1, policy, config]`, then `submit`, `end`, `plan`, `commit`, `told` (charges were taken)
and `differs` (a shadow) as they happened, at last `["stop", why]`. `engine.sim.replay` plays them again.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from engine.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.contract import Accounts, Advance, Request
from engine.scheduler.policies import Policy
from engine.scheduler.step import Sample, StepOutcome, StepPlan
from engine.serve.log import Log

__all__ = ["END", "VERSION", "Event", "Recorded", "Scribe", "Tape"]

VERSION = 1
END = -1
"""Stands for any token that ended a sequence."""
_BEHIND = 20_000
"""Events that may wait for the disk; beyond, the recording ends."""

Event = tuple[Any, ...]
"""Name, time, and what the scheduler was given or gave: frozen values, so that another thread may write them later."""


class Recorded(Scheduler):
    """A scheduler that tells what it is asked. It decides as `Scheduler` does."""

    def __init__(self, config: SchedulerConfig, policy: Policy, tell: Callable[[Event], object]) -> None:
        super().__init__(config, policy)
        self._tell = tell
        tell(("recording", VERSION, policy.name, config))

    def submit(self, request: Request, now: float) -> None:
        super().submit(request, now)
        self._tell(("submit", now, request))

    def end(self, sequence: int, now: float) -> None:
        self._tell(("end", now, sequence))
        super().end(sequence, now)

    def plan(self, now: float, accounts: Accounts | None = None) -> StepPlan:
        plan = super().plan(now, accounts)
        self._tell(("plan", now, accounts, plan))
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> tuple[Advance, ...]:
        advances = super().commit(plan, outcome, now)
        self._tell(("commit", now, outcome, advances))
        return advances

    def take_charges(self) -> tuple[tuple[int, str, float], ...]:
        self._tell(("told",))
        return super().take_charges()


class Scribe:
    """Turns events into lines that hold no token of anybody.

    A token becomes 48 bits of a keyed hash of all tokens up to it and its tenant's salt. So two sequences have equal
    stand-ins exactly as far as they begin alike, which is all that the prefix cache asks; the key is never written.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._hashes: dict[int, Any] = {}

    def line(self, event: Event) -> bytes:
        name, *rest = event
        match name:
            case "submit":
                rest[1] = self._request(rest[1])
            case "end":
                self._hashes.pop(rest[1], None)
            case "plan" if rest[1] is not None:
                rest[1] = [list(rest[1].deficits.items()), [[*key, v] for key, v in rest[1].counters.items()]]
            case "commit":
                rest[1:] = [self._outcome(*rest[1:])]
        return msgspec.json.encode((name, *rest)) + b"\n"

    def _request(self, request: Request) -> Request:
        start = hashlib.blake2b(request.salt.encode(), key=self._key, digest_size=6)
        self._hashes[request.sequence] = start
        salt = start.copy().hexdigest()
        return replace(request, prompt=self._hide(request.sequence, request.prompt), ends=frozenset((END,)), salt=salt)

    def _outcome(self, outcome: StepOutcome, advances: Iterable[Advance]) -> StepOutcome:
        samples = []
        for a in advances:
            ended = (END,) if a.finish == "stop" else ()
            samples.append(Sample(a.sequence, (*self._hide(a.sequence, a.tokens), *ended)))
            if a.finish is not None:
                del self._hashes[a.sequence]
        return replace(outcome, samples=tuple(samples), faults=tuple((number, "") for number, _ in outcome.faults))

    def _hide(self, sequence: int, tokens: Iterable[int]) -> tuple[int, ...]:
        """Stand-ins for the next tokens of a sequence."""
        hidden, so_far = [], self._hashes[sequence]
        for token in tokens:
            so_far.update(token.to_bytes(8, "little"))
            hidden.append(int.from_bytes(so_far.digest(), "little"))
        return tuple(hidden)


class Tape(threading.Thread):
    """Writes events to a file, off the step's thread. Full, too slow or out of disk, it stops and says so; serving goes
    on. An older file of the name is kept as `NAME.1`."""

    def __init__(self, path: Path, limit_bytes: int, log: Log) -> None:
        """Raises OSError when the file can't be written."""
        super().__init__(name="tape", daemon=True)
        if path.exists():
            path.replace(f"{path}.1")
        self._file = path.open("xb")
        path.chmod(0o600)
        self.path, self._limit, self._log = path, limit_bytes, log
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._scribe, self._size, self._stopped = Scribe(), 0, False

    def tell(self, event: Event) -> None:
        """Never waits."""
        if not self._stopped:
            self._events.put(event)
            if self._events.qsize() > _BEHIND:
                self.close("the disk was too slow")

    def close(self, why: str, timeout_s: float = 0.0) -> None:
        """Write what is left, `why` last, and wait for that so long."""
        if not self._stopped:
            self._stopped = True
            self._events.put(("stop", why))
        if timeout_s:
            self.join(timeout_s)

    def run(self) -> None:
        try:
            with self._file as file:
                event: Event = ("",)
                while event[0] != "stop":
                    event = self._events.get()
                    line = self._scribe.line(event)
                    if self._size + len(line) > self._limit and event[0] != "stop":
                        event = ("stop", f"it reached {self._limit >> 20} MiB")
                        line = self._scribe.line(event)
                    self._size += file.write(line)
                    if self._events.empty():
                        file.flush()
            self._log.info("recording_ended", file=str(self.path), bytes=self._size, why=event[1])
        except Exception as error:  # a recording that fails must not end what it records
            self._log.error("recording_failed", file=str(self.path), detail=f"{type(error).__name__}: {error}"[:200])
        finally:
            self._stopped = True
