"""The only two values that pass between deciding and acting: `StepPlan` and `StepOutcome`.

Both are frozen, printable and JSON-able (`msgspec.json.encode` works on them), so that a recorded run can be replayed.
Positions and lengths are tokens; a block id is an index into the device (or host) pool.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BlockCopy", "Drop", "Extend", "Park", "Restore", "Sample", "Slice", "Start", "StepOutcome", "StepPlan"]


@dataclass(frozen=True, slots=True, init=False)
class Slice:
    """The only unit of work: compute `length` known tokens of `sequence` from position `start` on.

    A decode is a slice of one. `samples` says that the slice reaches the last known token, so its last row yields the
    next one (or, for one-shot work, that this slice ends it). `drafts` are speculated token ids appended after the
    known ones, verified in the same step.
    """

    sequence: int
    start: int
    length: int
    samples: bool
    drafts: tuple[int, ...] = ()

    # A plan makes hundreds: twice as fast as what a frozen dataclass makes of itself.
    def __init__(self, sequence: int, start: int, length: int, samples: bool, drafts: tuple[int, ...] = ()) -> None:
        _set_sequence(self, sequence)
        _set_start(self, start)
        _set_length(self, length)
        _set_samples(self, samples)
        _set_drafts(self, drafts)


_setters = [Slice.__dict__[name].__set__ for name in Slice.__slots__]
_set_sequence, _set_start, _set_length, _set_samples, _set_drafts = _setters


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence begins (or begins again after recompute preemption) with this block table.

    `cached` leading tokens are already in those blocks (a prefix hit); the first slice starts there.
    """

    sequence: int
    blocks: tuple[int, ...]
    cached: int


@dataclass(frozen=True, slots=True)
class Extend:
    """These device blocks are appended to the sequence's table."""

    sequence: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: device block `source` is copied to device block `target`, which replaces it in `sequence`'s table.

    `index` is the position in the table.
    """

    sequence: int
    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Park:
    """The sequence leaves the device: its table's blocks `device` are copied to `host`; its table is forgotten.

    Empty tuples mean parked by recompute: nothing is kept, the sequence comes back with a `Start`. `computed` tokens
    are held by the copied blocks. Device blocks of a swap are not given to anyone else in the same plan.
    """

    sequence: int
    device: tuple[int, ...]
    host: tuple[int, ...]
    computed: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The sequence returns: `host` blocks are copied into the first of `device`, which become its table.

    `device` may have more blocks than `host` (room to grow). `computed` tokens are valid.
    """

    sequence: int
    host: tuple[int, ...]
    device: tuple[int, ...]
    computed: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The sequence has ended; the runner forgets it."""

    sequence: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner does in one step, in this order: drops, parks, restores, starts, extends, copies, slices.

    The order of `slices` is the row order of the batch (total and stable). A plan without slices may still carry the
    other acts. Nothing in the plan has happened until the outcome is committed.
    """

    step: int
    slices: tuple[Slice, ...] = ()
    starts: tuple[Start, ...] = ()
    extends: tuple[Extend, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    parks: tuple[Park, ...] = ()
    restores: tuple[Restore, ...] = ()
    drops: tuple[Drop, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens computed by the step, drafts included."""
        return sum(s.length + len(s.drafts) for s in self.slices)

    @property
    def empty(self) -> bool:
        return not (self.slices or self.parks or self.restores or self.drops or self.copies)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens a slice yielded: one normally, 1 + accepted drafts with speculation."""

    sequence: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the step did. `seconds` is its measured (or simulated) duration; `faults` names sequences that failed alone.

    A fault is (sequence, reason): the sequence ends with an error, the rest of the step stands.
    """

    step: int
    samples: tuple[Sample, ...] = ()
    seconds: float = 0.0
    joules: float = 0.0
    faults: tuple[tuple[int, str], ...] = ()
