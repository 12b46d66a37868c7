"""What passes between the step loop and the threads that talk to Redis. The loop never waits for the network."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from engine.protocol.events import Event
from engine.protocol.messages import Delta, Work

__all__ = [
    "SWITCH_S",
    "Abandoned",
    "Accounted",
    "Arrived",
    "Broken",
    "Cancelled",
    "Channel",
    "Direct",
    "DrainOrdered",
    "Inbox",
    "Item",
    "Link",
    "Parcel",
    "Prepared",
    "Refused",
    "connect",
]

SWITCH_S = 0.0005
"""How long a thread of an engine may keep the others from the interpreter. With Python's 5 ms, whoever brings a request
or takes a token out waits that long whenever the loop is busy."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A pulled request. `era` names the life of the Redis data it came from."""

    work: Work
    epoch: int
    era: bytes
    by_floor: bool = False


@dataclass(frozen=True, slots=True)
class Accounted:
    """Accounts of the pool as a pull left them: deficits by tier, counters by `tier:tenant`."""

    accounts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cancelled:
    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The engine was given up (it slept past its lease): what it holds belongs to others now."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A thread of the engine has failed in a way that waiting does not mend."""

    detail: str


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    """Take no more work, end what runs, leave."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request had to wait for is there, or never will be: then `reason` says why, and `code` in a word."""

    request: str
    reason: str
    code: str = ""
    pixels: tuple[bytes, ...] = ()
    """Of its images."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The pool won't have this engine; the sentence says why."""

    sentence: str


Item = Accounted | Arrived | Cancelled | Prepared | Abandoned | Broken | DrainOrdered | Refused | None
Inbox = SimpleQueue[Item]
"""`None` only wakes the loop."""


@dataclass(slots=True)
class Parcel:
    """What one step has to say: deltas by gateway, finals as (request, epoch, era, encoded), events, charges."""

    deltas: dict[str, list[Delta]] = field(default_factory=dict)
    kept: dict[str, list[Delta]] = field(default_factory=dict)
    """By request: the deltas of resumable ones once more, for whichever gateway goes on with them."""
    finals: list[tuple[str, int, bytes, bytes]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    charges: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.deltas or self.finals or self.events or self.charges)


@dataclass(slots=True)
class Link:
    """State that the loop and the puller share. `lock` is held while a pull is under way: the credit it spends was
    counted without the works it brings, so nobody may offer credit until they are in the inbox."""

    inbox: Inbox = field(default_factory=SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    credit: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    """Room for known tokens; what is pulled takes from it, and without any nothing more is pulled."""
    tiers: dict[int, str] = field(default_factory=lambda: {0: "interactive", 1: "standard", 2: "batch"})
    """Names by rank; the puller adds what the pool's queue knows."""
    nudge: threading.Event = field(default_factory=threading.Event)
    """Set: pull now."""
    pulled: threading.Event = field(default_factory=threading.Event)
    """Set: a pull is over."""
    known: set[str] = field(default_factory=set)
    """Requests pulled whose Final was not accepted yet."""
    unspent: int = 0
    """Those of them that may not be taken from the credit yet."""
    early: dict[str, str] = field(default_factory=dict)
    """Cancels that came before their requests, which travel another way: reasons by request."""
    withdrawn: threading.Event = field(default_factory=threading.Event)
    """Set: `quiet` was, and all that was pulled for this engine before that has arrived."""
    quiet: threading.Event = field(default_factory=threading.Event)
    """Set: renew the lease and read orders, but take no more work."""
    spare: bool = False
    """There is free room (credit may also be what could be evicted)."""
    hungry: bool = False
    """The listener has seen the free room, so the pool's wake list wakes this engine."""
    _arrivals: threading.Lock = field(default_factory=threading.Lock)

    def arrive(self, arrived: Arrived) -> bool:
        """Hand a request to the loop. False: it was before, a request may be heard of in more than one way."""
        request = arrived.work.request
        with self._arrivals:
            if request in self.known:
                return False
            self.known.add(request)
            self.inbox.put(arrived)
            if (reason := self.early.pop(request, None)) is not None:
                self.inbox.put(Cancelled(request, reason))
        return True

    def cancel(self, request: str, reason: str) -> None:
        """Hand a cancel to the loop, after its request."""
        with self._arrivals:
            if request in self.known:
                self.inbox.put(Cancelled(request, reason))
            else:
                self.early[request] = reason

    def spend(self, work: Work) -> None:
        """Take from the offered credit what a request needs. Only with `lock`."""
        slots = len(work.prompts) * work.n
        self.tokens -= sum(map(len, work.prompts))
        self.credit = {t: left - slots for t, left in self.credit.items() if left > slots} if self.tokens > 0 else {}


def connect(url: str, timeout_s: float = 5.0) -> Redis:
    """A blocking client that never repeats a command by itself: a pull done twice would lose what the first brought."""
    return Redis.from_url(
        url, socket_timeout=timeout_s, socket_connect_timeout=2.0, retry=Retry(NoBackoff(), 0), health_check_interval=0
    )


class Direct:
    """A connection of a thread's own beside its client's pool: for the few commands that a request's first token waits
    for, each of which spends more time in the client's layers (pool, retries, callbacks) than on its way."""

    def __init__(self, redis: Redis) -> None:
        self._connection: Any = redis.connection_pool.make_connection()

    def ask(self, *words: str | bytes | int | float) -> Any:
        """One command and its answer, as the server gives it. Raises `RedisError`; the next one connects again."""
        self._connection.send_command(*words)
        return self._connection.read_response()

    def ask_all(self, commands: list[tuple[str | bytes | int | float, ...]]) -> None:
        """Commands whose answers are of no interest, in one write. Raises the first error among them, after all."""
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        failed: ResponseError | None = None
        for _ in commands:
            try:
                self._connection.read_response()
            except ResponseError as error:
                failed = failed or error
        if failed is not None:
            raise failed


class Channel:
    """A connection of a thread's own that listens to one pub/sub channel."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._connection: Any = redis.connection_pool.make_connection()
        self._name = name

    def subscribe(self) -> None:
        """Begin, or begin anew after a `RedisError`."""
        self._connection.disconnect()
        self._connection.send_command("SUBSCRIBE", self._name)

    def ping(self) -> None:
        """Make the server say something."""
        self._connection.send_command("PING")

    def next(self, wait_s: float) -> bytes | None:
        """The next message; empty: the server said something else; None: nothing in time. Raises `RedisError`."""
        if not self._connection.can_read(wait_s):
            return None
        said = self._connection.read_response(push_request=True)
        return bytes(said[2]) if isinstance(said, list) and said[0] == b"message" else b""
