"""One admitted request from admission to its one outcome: what was asked, what was delivered, and when."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from engine.protocol.events import Event, Kind
from engine.protocol.messages import Outcome
from gateway.dispatch.recorder import Recorder
from gateway.dispatch.reply import Reply

__all__ = ["Flight", "Route", "Trail"]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes and for whom; fixed at admission."""

    request: str
    pool: str
    model: str
    tier: str
    tenant: str
    project: str = ""
    key: str = ""
    kind: str = "chat"
    stream: bool = False
    prompt_tokens: int = 0
    client_request_id: str = ""


@dataclass(slots=True)
class Trail:
    """Emits a request's events, each with the time since the one before it in this process."""

    recorder: Recorder
    source: str
    request: str
    last: float
    tenant: str = ""
    tier: str = ""
    pool: str = ""

    def emit(self, kind: Kind, /, **attributes: str | int | float | bool | None) -> None:
        now = time.monotonic()
        since, self.last = now - self.last, now
        self.recorder.event(
            Event(
                request=self.request,
                kind=kind.value,
                at_ms=int(time.time() * 1000),
                since_s=since,
                source=self.source,
                tenant=self.tenant,
                tier=self.tier,
                pool=self.pool,
                attributes=attributes,
            )
        )


@dataclass(slots=True)
class Flight:
    """The state of one admitted request in this process. `end` is called on every exit path; the first call counts."""

    route: Route
    reply: Reply
    trail: Trail
    recorder: Recorder
    received: float
    """Monotonic time at which the request's first byte was seen."""
    received_ms: int
    ended: bool = False
    stopping: bool = False
    """A cancel is on its way to the engine."""
    delivered_tokens: int = 0
    admitted: float | None = None
    """Monotonic time at which Redis said so; until then it need not know the request."""
    first_received: float | None = None
    last_received: float | None = None
    first_sent: float | None = None
    last_sent: float | None = None
    stall_s: float | None = None
    resumable: bool = False
    turn: int = 0
    """How often the request was adopted before: only the newest owner speaks for it."""
    had: int = 0
    """Events that its client had from an earlier owner."""
    parked: bool = False
    """Its client is gone and may come back: nothing is kept for it here."""
    consumer: asyncio.Task[Any] | None = None
    """The task that sends to the client, while it streams."""

    def delivered(self, tokens: int) -> None:
        """`tokens` more were handed to the client just now."""
        now = time.monotonic()
        self.delivered_tokens += tokens
        if self.first_sent is None:
            self.first_sent = now
            self.trail.emit(Kind.FIRST_SENT)
        if self.last_sent is not None:
            gap = now - self.last_sent
            if self.stall_s is None or gap > self.stall_s:
                self.stall_s = gap
        self.last_sent = now

    def was_first_sent(self, made_ms: int) -> None:
        """Its first token was made at `made_ms` (wall time), and an earlier owner sent it: that was the wait."""
        if self.first_sent is None:
            self.first_sent = self.received + max(0, made_ms - self.received_ms) / 1000

    def end(self, status: int, reason: str, code: str = "") -> bool:
        """Record what the client saw. False when that was done before."""
        if self.ended:
            return False
        self.ended = True
        self.trail.emit(Kind.LAST_SENT, status=status, reason=reason, code=code, tokens=self.delivered_tokens)
        self.recorder.outcome(self._outcome(status, reason, code))
        return True

    def _outcome(self, status: int, reason: str, code: str) -> Outcome:
        route, first, last = self.route, self.first_sent, self.last_sent
        per_token = None
        if first is not None and last is not None and self.delivered_tokens > 1 and self.route.stream:
            per_token = (last - first) / (self.delivered_tokens - 1)
        return Outcome(
            request=route.request,
            pool=route.pool,
            tier=route.tier,
            tenant=route.tenant,
            project=route.project,
            key=route.key,
            model=route.model,
            kind=route.kind,
            stream=route.stream,
            status=status,
            reason=reason,
            received_ms=self.received_ms,
            ttft_s=None if first is None else first - self.received,
            tpot_s=per_token,
            stall_s=self.stall_s,
            total_s=time.monotonic() - self.received,
            delivered_tokens=self.delivered_tokens,
            prompt_tokens=route.prompt_tokens,
            code=code,
            client_request_id=route.client_request_id,
        )
