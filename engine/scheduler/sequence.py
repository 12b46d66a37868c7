"""One sequence as the scheduler keeps it: known tokens, computed tokens, where its KV is. Changed only by `commit`."""

from __future__ import annotations

from enum import Enum

from engine.kv.table import Table
from engine.scheduler.contract import Request

__all__ = ["Sequence", "State"]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"


class Sequence:
    """Catch-up rule: scheduling is letting `computed` catch up with `known`.

    `tokens` are the prompt and the output so far. A parked sequence holds `host` blocks with `computed` tokens, or
    none when it was parked by recompute.
    """

    __slots__ = (
        "by_floor",
        "cached",
        "computed",
        "first_s",
        "generated",
        "host",
        "known",
        "last_s",
        "late",
        "limit",
        "match",
        "number",
        "parks",
        "recomputed",
        "request",
        "since_s",
        "state",
        "submitted_s",
        "table",
        "tenant",
        "tier",
        "tokens",
    )

    def __init__(self, request: Request, limit: int, now: float) -> None:
        self.request = request
        self.number, self.tier, self.tenant = request.sequence, request.tier, request.tenant
        self.tokens = list(request.prompt)
        self.known = len(self.tokens) or request.cost_tokens
        self.computed = 0
        self.by_floor = request.by_floor
        self.late = False
        """Waiting, and past the point where its deadline could still be met."""
        self.cached = 0
        self.generated = 0
        self.limit = limit
        """Output tokens it may make (its own bound, the context, what the pool could hold)."""
        self.state = State.WAITING
        self.table = Table(request.salt, request.tier)
        self.host: tuple[int, ...] = ()
        self.submitted_s = now
        self.since_s = now
        """When it was last started or restored."""
        self.first_s = 0.0
        self.last_s = 0.0
        self.parks = 0
        self.recomputed = 0
        """Tokens computed a second time after a park by recompute."""
        self.match: tuple[int, int, int] | None = None
        """Cached prefix length as of an index version: (version, known, tokens)."""

    @property
    def one_shot(self) -> bool:
        return self.request.max_new == 0

    @property
    def prefilling(self) -> bool:
        return self.known - self.computed > 1 or not self.generated

    def __repr__(self) -> str:
        return f"<{self.number} tier {self.tier} {self.tenant} {self.state.value} {self.computed}/{self.known}>"
