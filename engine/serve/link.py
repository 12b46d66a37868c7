"""What passes between the step loop and the threads that talk to Redis. The loop never waits for the network."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast

import hiredis
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
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

_NOT_YET = object()
_READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Arrived:
    """A pulled request. `era` names the life of the Redis data it came from."""

    work: Work
    epoch: int
    era: bytes
    by_floor: bool = False
    light: bool = False


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

    @property
    def counted(self) -> int:
        """Requests that the offered credit takes into account. One that was handed over is unspent before it is known,
        and below 0 the queue would take nothing for counted."""
        return max(0, len(self.known) - self.unspent)

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


class _Socket:
    """A connection of the client library's, which opens it (address, TLS, password, database), read and written without
    its layers: those of one answer cost more than it takes the server to give it."""

    def __init__(self, redis: Redis, wait_s: float | None = None) -> None:
        """`wait_s`: how long a read waits, if not as long as the client does."""
        self._connection: Any = redis.connection_pool.make_connection()
        self._reader: hiredis.Reader | None = None
        self._wait_s = wait_s

    def disconnect(self) -> None:
        self._reader = None
        self._connection.disconnect()

    def write(self, data: bytes) -> None:
        """Connects first if need be. Raises `RedisError`."""
        if self._reader is None:
            self._connection.connect()
            if self._wait_s is not None:
                self._connection._sock.settimeout(self._wait_s)
            self._reader = hiredis.Reader(
                protocolError=InvalidResponse, replyError=self._connection._parser.parse_error, notEnoughData=_NOT_YET
            )
        try:
            self._connection._sock.sendall(data)
        except OSError as error:
            raise self._lost(error) from None

    def read(self) -> Any:
        """What the server says next, errors too; `_NOT_YET` when it says nothing in time. Raises `RedisError`."""
        reader = self._reader
        if reader is None:
            raise RedisConnectionError("the connection to Redis was closed")
        try:
            while (found := reader.gets()) is _NOT_YET:
                data = self._connection._sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("closed by the server")
                reader.feed(data)
        except TimeoutError:
            return _NOT_YET
        except (OSError, InvalidResponse) as error:
            raise self._lost(error) from None
        if isinstance(found, RedisConnectionError):
            raise self._lost(found)
        return found

    def _lost(self, error: Exception) -> RedisError:
        self.disconnect()
        kind = RedisTimeoutError if isinstance(error, TimeoutError) else RedisConnectionError
        return kind(f"the connection to Redis is lost: {error}")


def _pack(*words: str | bytes | int | float) -> bytes:
    return hiredis.pack_command(cast("Any", words))  # its stub means a tuple of one word


class Direct:
    """A connection of a thread's own beside its client's pool: for the few commands that a request's first token waits
    for, each of which spends more time in the client's layers (pool, retries, callbacks) than on its way."""

    def __init__(self, redis: Redis) -> None:
        self._socket = _Socket(redis)

    def ask(self, *words: str | bytes | int | float) -> Any:
        """One command and its answer, as the server gives it. Raises `RedisError`; the next one connects again."""
        self._socket.write(_pack(*words))
        found = self._answer()
        if isinstance(found, RedisError):
            raise found
        return found

    def ask_all(self, commands: list[tuple[str | bytes | int | float, ...]]) -> None:
        """Commands whose answers are of no interest, in one write. Raises the first error among them, after all."""
        self._socket.write(b"".join(_pack(*words) for words in commands))
        answers = [self._answer() for _ in commands]
        for found in answers:
            if isinstance(found, RedisError):
                raise found

    def _answer(self) -> Any:
        while isinstance(found := self._socket.read(), hiredis.PushNotification):
            pass
        if found is _NOT_YET:
            self._socket.disconnect()
            raise RedisTimeoutError("Redis did not answer in time")
        return found


class Channel:
    """A connection of a thread's own that listens to one pub/sub channel."""

    def __init__(self, redis: Redis, name: str, wait_s: float) -> None:
        self._socket, self._name = _Socket(redis, wait_s), name

    def subscribe(self) -> None:
        """Begin, or begin anew after a `RedisError`."""
        self._socket.disconnect()
        self._socket.write(_pack("SUBSCRIBE", self._name))

    def ping(self) -> None:
        """Make the server say something."""
        self._socket.write(_pack("PING"))

    def next(self) -> bytes | None:
        """The next message; empty: the server said something else; None: nothing within `wait_s`. Raises
        `RedisError`."""
        said = self._socket.read()
        if said is _NOT_YET:
            return None
        if isinstance(said, RedisError):
            raise said
        return bytes(said[2]) if isinstance(said, list) and said[0] == b"message" else b""
