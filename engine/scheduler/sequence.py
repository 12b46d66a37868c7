"""One sequence as the scheduler keeps it: known tokens, computed tokens, where its KV is. Changed only by `commit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from engine.kv.table import Table, blocks_for
from engine.scheduler.contract import Request

__all__ = ["Sequence", "State"]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Catch-up rule: scheduling is letting `computed` catch up with `known`.

    `tokens` are the prompt and the output so far. A parked sequence holds `host` blocks with `computed` tokens, or
    none when it was parked by recompute.
    """

    request: Request
    limit: int
    """Output tokens it may make (its own bound, the context, what the pool could hold)."""
    submitted_s: float
    number: int = field(init=False)
    tier: int = field(init=False)
    tenant: str = field(init=False)
    tokens: list[int] = field(init=False)
    known: int = field(init=False)
    by_floor: bool = field(init=False)
    one_shot: bool = field(init=False)
    table: Table = field(init=False)
    billed: int = field(init=False)
    """Prompt tokens that are charged."""
    tpot_s: float = field(init=False)
    """Its target between tokens (inf: none)."""
    due_s: float = inf
    """When its next token is due to keep that; once it has made one."""
    since_s: float = field(init=False)
    """When it was last started or restored."""
    computed: int = 0
    late: bool = False
    """Waiting, and past the point where its deadline could still be met."""
    cached: int = 0
    generated: int = 0
    state: State = State.WAITING
    host: tuple[int, ...] = ()
    first_s: float = 0.0
    last_s: float = 0.0
    parks: int = 0
    recomputed: int = 0
    """Tokens computed a second time after a park by recompute."""
    match: tuple[int, int, int] | None = None
    """Cached prefix length as of an index version: (version, known, tokens)."""

    def __post_init__(self) -> None:
        request = self.request
        self.number, self.tier, self.tenant = request.sequence, request.tier, request.tenant
        self.tokens, self.by_floor = list(request.prompt), request.by_floor
        self.one_shot = request.max_new == 0
        self.known = len(self.tokens) or request.cost_tokens
        self.billed, self.tpot_s = max(len(request.prompt), request.cost_tokens), request.tpot_s or inf
        self.table, self.since_s = Table(request.salt, request.tier), self.submitted_s

    @property
    def prefilling(self) -> bool:
        return self.known - self.computed > 1 or not self.generated

    def lacks(self, size: int) -> int:
        """Blocks of `size` tokens still to be taken for what is known; one-shot work holds none."""
        return 0 if self.one_shot else max(0, blocks_for(self.known, size) - len(self.table.blocks))

    def __repr__(self) -> str:
        return f"<{self.number} tier {self.tier} {self.tenant} {self.state.value} {self.computed}/{self.known}>"
