"""What the serving loop may ask of a backend.

The same five calls drive a torch model, an upstream server and the simulated engine, so tiers, fairness, SLO and
billing hold for each of them with no branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from engine.protocol.messages import ModelCard, Sampling
from engine.scheduler.step import StepOutcome, StepPlan

__all__ = ["Backend", "Capacity", "Constraining", "Logprob", "Seeing", "SequenceInput", "TokenInfo"]


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """All a backend is told about a sequence: token ids, how many of them are prompt, how to sample, and its place.

    `seed` and `choice` (with the position) key the counter-based random numbers, so that a sequence can be resumed
    elsewhere. `prompt_length` < len(tokens) after a re-dispatch: the rest was already delivered.
    """

    sequence: int
    tokens: tuple[int, ...]
    prompt_length: int
    sampling: Sampling
    seed: int
    choice: int
    pixels: bytes = b""
    """Of an image: what the backend made of it before (`Seeing`)."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One alternative at a position. `logprob` is natural-log, finite (clamped at -9999)."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Log-probabilities of one sampled (or, with `echo`, prompt) token: its own and the best alternatives."""

    token: int
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the scheduler's ledger starts from. Blocks are `block_size` tokens; `max_rows` sequences per step."""

    block_size: int
    device_blocks: int
    host_blocks: int
    max_rows: int
    max_step_tokens: int
    context_length: int
    swap_bytes_per_s: float = 8e9
    block_bytes: int = 0
    max_preparing: int = 0
    """Sequences that may be under preparation (`Seeing`) before the engine pulls no more; 0: any number."""


@dataclass(slots=True)
class Extras:
    """Side results of a step, by sequence: log-probabilities of its new tokens, and vectors of one-shot work."""

    logprobs: dict[int, tuple[TokenInfo, ...]] = field(default_factory=dict)
    vectors: dict[int, list[float]] = field(default_factory=dict)


class Backend(Protocol):
    """A plug-in. `execute` is called from one thread only."""

    card: ModelCard
    capacity: Capacity

    def add(self, sequence: SequenceInput) -> None:
        """Make a sequence known before the first plan that names it."""
        ...

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Do what the plan says, in its order; report tokens and the time it took."""
        ...

    def extras(self) -> Extras:
        """Side results of the last `execute`."""
        ...

    def fingerprint(self) -> str:
        """Identifies weights, dtype, kernel and block size: parked KV from another fingerprint is recomputed."""
        ...

    def close(self) -> None:
        """Free what the backend holds."""
        ...


@runtime_checkable
class Constraining(Protocol):
    """A backend that can hold its answers to a constraint (`Sampling.grammar`); its card says "grammar"."""

    def prepare(self, constraint: str, done: Callable[[str], None]) -> bool:
        """Get ready for sequences under this constraint, before `add`. True: it is ready.

        Else `done` is called once, from another thread: with "" when it is ready, or with the reason why it never is.
        """
        ...


@runtime_checkable
class Seeing(Protocol):
    """A backend that takes images (`Work.images`); its card says "image"."""

    def look(
        self,
        images: tuple[bytes, ...],
        rank: int,
        done: Callable[[tuple[bytes, ...], str, str], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Make pixels of a request's images, before `add`; those of a better (lower) tier rank first.

        `done` is called once, from another thread: with the pixels of each, or with none, an error code and the reason.
        `wanted` is asked before each image, from any thread: once false, the rest may be left undone and untold.
        """
        ...
