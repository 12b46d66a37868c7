"""What the twin keeps of a cell, and the acts that several functions share.

Redis keeps indexes (open requests by tenant, gateway and engine, depths, holds, expiries, heads of queues) because it
must not search. Here they are asked of the requests themselves, so each says what it means.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.protocol.fair import FairQueue
from engine.protocol.functions import Admission, Handed
from engine.protocol.messages import Control, Delta, Final, Timeline

__all__ = ["Account", "Claimed", "Queue", "Record", "Resumable", "Standing", "State"]


@dataclass(slots=True)
class Record:
    """One admitted request until it is closed. `state`: queued, running, lost, finished."""

    a: Admission
    work: bytes
    arrival: int
    admitted_ms: int
    member: str
    """Its stream: the tenant, "!tenant" for late ones, "~request" for one that was queued again."""
    expires_ms: int
    gateway: str
    state: str = "queued"
    epoch: int = 0
    attempts: int = 0
    engine: str = ""
    pulled_ms: int = 0
    cancel: str = ""
    grace_ms: int = 0
    """A resumable one without a client ends then."""


@dataclass(slots=True)
class Resumable:
    """Who goes on with a resumable request; a higher turn is a later owner."""

    tenant: str
    gateway: str
    ask: str
    turn: int = 0
    told: bool = False


@dataclass(slots=True)
class Standing:
    """What an engine that waits would take: slots by tier, and room for known tokens. The lowest turn is next."""

    turn: int
    credit: dict[str, int]
    tokens: int
    until_ms: int


@dataclass(slots=True)
class Queue:
    """One stream by arrival number. Started ones stay in `entries` until their request ends."""

    waiting: OrderedDict[int, Record] = field(default_factory=OrderedDict)
    entries: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Account:
    generation: int | None = None
    balance_nano: int | None = None
    sequence: int | None = None


@dataclass(slots=True)
class Claimed:
    digest: str
    request: str
    expires_ms: int
    finished: bool = False


class State:
    """All of a cell's state. Each part of a request's state is changed by one method here and nowhere else."""

    def __init__(self) -> None:
        self.requests: dict[str, Record] = {}
        self.queues: dict[tuple[str, str], dict[str, Queue]] = defaultdict(dict)
        self.tiers: dict[str, dict[str, int]] = defaultdict(dict)
        self.fair: dict[str, FairQueue] = defaultdict(FairQueue)
        self.drain: dict[tuple[str, str], tuple[float, int]] = {}
        self.accounts: dict[str, Account] = defaultdict(Account)
        self.buckets: dict[tuple[str, str], tuple[float, int]] = {}
        self.claims: dict[tuple[str, str], Claimed] = {}
        self.gateways: dict[str, int] = {}
        self.reaped: dict[str, int] = {}
        self.engines: dict[str, dict[str, int]] = defaultdict(dict)
        self.standing: dict[str, dict[str, Standing]] = defaultdict(dict)
        self.listeners: set[str] = set()
        """Engines that listen to their channel."""
        self.handed: dict[str, list[Handed]] = defaultdict(list)
        """What went over it."""
        self.pools: dict[str, str] = {}
        self.cards: dict[str, bytes] = {}
        self.resumable: dict[str, Resumable] = {}
        self.replies: dict[str, list[Delta]] = {}
        self.controls: dict[str, list[Control]] = defaultdict(list)
        self.usage: list[Final] = []
        self.dead: list[str] = []
        self.era = ""
        self.arrivals = 0
        self.tick: tuple[int, int] | None = None

    def those(self, wanted: Callable[[Record], bool]) -> list[Record]:
        """Requests in the order of their names."""
        return [r for _, r in sorted(self.requests.items()) if wanted(r)]

    def waiting(self, pool: str, tier: str) -> list[Record]:
        return [r for queue in self.queues[pool, tier].values() for r in queue.waiting.values()]

    def order(self, r: Record, reason: str) -> None:
        """Tell its engine to stop."""
        r.cancel = reason
        self.controls[r.engine].append(Control("cancel", r.a.request, reason))

    def tell(self, gateway: str, request: str, epoch: int, code: str, detail: str, start: int = 0) -> None:
        """A last error delta of the whole request, if the gateway is there."""
        if gateway in self.replies:
            delta = Delta(request, 0, epoch, start, (), "", finish="error", code=code, detail=detail, last=True)
            self.replies[gateway].append(delta)

    def enqueue(self, r: Record) -> None:
        queue = self.queues[r.a.pool, r.a.tier].setdefault(r.member, Queue())
        queue.waiting[r.arrival] = r
        queue.entries.add(r.arrival)
        self.tiers[r.a.pool][r.a.tier] = r.a.tier_rank

    def drop_entry(self, r: Record) -> None:
        queues = self.queues[r.a.pool, r.a.tier]
        if (queue := queues.get(r.member)) is not None:
            queue.waiting.pop(r.arrival, None)
            queue.entries.discard(r.arrival)
            if not queue.entries:
                del queues[r.member]

    def free(self, r: Record, served: bool) -> None:
        """It has ended: its entry, its turn in the fair queue and its idempotency claim (kept if it was served) go."""
        self.drop_entry(r)
        fair = self.fair[r.a.pool]
        if r.state == "running":
            fair.stop(r.a.tier, r.a.choices)
        fair.leave(r.a.tier, r.a.tenant, r.a.choices)
        key = (r.a.tenant, r.a.claim.key if r.a.claim else "")
        claim = self.claims.get(key)
        if claim is not None and claim.request == r.a.request:
            if served:
                claim.finished = True
            else:
                del self.claims[key]

    def unqueue(self, r: Record) -> None:
        """It never ran, so it goes as if it had never been."""
        self.free(r, False)
        self.resumable.pop(r.a.request, None)
        del self.requests[r.a.request]

    def expire(self, r: Record) -> None:
        self.tell(r.gateway, r.a.request, r.epoch, "queue_timeout", "not started before its deadline")
        self.unqueue(r)

    def conclude(self, r: Record, final: Final, served: bool) -> None:
        """It ran and has ended: one Final; its hold stays until a settler closes it."""
        self.usage.append(final)
        self.free(r, served)
        r.state, r.grace_ms = "finished", 0

    def conclude_orphan(self, now: int, r: Record) -> None:
        """It lost both its engine and its gateway: the prompt is all that is known of it."""
        queued = Timeline(queued_s=(r.pulled_ms - r.admitted_ms) / 1000)
        final = Final(
            r.a.request, r.epoch, r.a.pool, r.a.tier, r.a.tenant, r.engine, "lost", r.a.prompt_tokens, 0, 0, 0, 0.0,
            0.0, queued, now, "engine_lost", "engine and gateway were lost",
        )  # fmt: skip
        self.conclude(r, final, False)

    def lose_requests(self, now: int, pool: str, engine: str) -> list[str]:
        """An engine left its pool. The raised epoch shuts it out; their gateways are told and now own their end."""
        self.standing[pool].pop(engine, None)
        lost = self.those(lambda r: r.state == "running" and r.engine == engine)
        for r in lost:
            r.epoch += 1
            r.state = "lost"
            self.fair[r.a.pool].stop(r.a.tier, r.a.choices)
            if self.gateways.get(r.gateway, 0) > now:
                detail = "the engine that computed this request was lost"
                self.tell(r.gateway, r.a.request, r.epoch, "engine_lost", detail)
            else:
                self.conclude_orphan(now, r)
        self.controls.pop(engine, None)
        return [r.a.request for r in lost]
