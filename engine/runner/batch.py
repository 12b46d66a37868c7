"""From the slices of a plan to packed tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention import PagedBatch
from engine.runner.sequences import Sequences, SequenceState
from engine.scheduler.step import Slice

__all__ = ["PackedStep", "SampleRow", "pack"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One packed row whose logits choose a token: the one at `position` of the sequence.

    `drafts` are the speculated tokens before it that the sequence doesn't know yet.
    """

    state: SequenceState
    position: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Inputs of one forward pass. `logit_rows` are packed rows: first those of `samples`, then of echoed prompts."""

    tokens: torch.Tensor
    batch: PagedBatch
    logit_rows: torch.Tensor | None
    samples: tuple[SampleRow, ...]
    echoes: tuple[tuple[SequenceState, int, int], ...]
    """(sequence, first, end): the logits of these positions tell the log-probabilities of the prompt tokens after."""


def pack(slices: tuple[Slice, ...], sequences: Sequences, block_size: int) -> PackedStep:
    """Lay the slices end to end. The work per slice is a few array operations, whatever its context."""
    states = [sequences[s.sequence] for s in slices]
    starts = np.array([s.start for s in slices], np.int32)
    lengths = np.array([s.length + len(s.drafts) for s in slices], np.int32)
    contexts = starts + lengths
    row_starts = np.zeros(len(slices) + 1, np.int32)
    np.cumsum(lengths, out=row_starts[1:])
    _check(slices, states, contexts, block_size)
    total = int(row_starts[-1])
    row_of_token = np.repeat(np.arange(len(slices)), lengths)
    positions = (np.arange(total, dtype=np.int32) - row_starts[:-1][row_of_token]) + starts[row_of_token]
    width = int(-(-contexts.max() // block_size))
    tables = np.stack([state.blocks[:width] for state in states])
    slots = tables[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
    samples, sample_rows = _sample_rows(slices, states, row_starts)
    echoes, echo_rows = _echo_rows(slices, states, row_starts)
    rows = sample_rows + echo_rows
    return PackedStep(
        tokens=torch.from_numpy(_tokens(slices, states, total)),
        batch=PagedBatch(
            row_starts=torch.from_numpy(row_starts),
            contexts=torch.from_numpy(contexts),
            tables=torch.from_numpy(tables),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
        ),
        logit_rows=torch.tensor(rows) if rows else None,
        samples=samples,
        echoes=echoes,
    )


def _check(slices: tuple[Slice, ...], states: list[SequenceState], contexts: np.ndarray, block_size: int) -> None:
    """A plan that doesn't fit what the runner knows is a bug of the planner: never compute on wrong blocks."""
    for part, state, context in zip(slices, states, contexts, strict=True):
        if context > state.block_count * block_size:
            raise ValueError(f"sequence {part.sequence}: {context} tokens don't fit {state.block_count} blocks")
        if part.start + part.length > state.length or part.length < 1:
            raise ValueError(f"sequence {part.sequence}: slice {part.start}+{part.length} of {state.length} tokens")
        if part.samples and part.start + part.length != state.length:
            raise ValueError(f"sequence {part.sequence}: samples before its last known token")


def _tokens(slices: tuple[Slice, ...], states: list[SequenceState], total: int) -> np.ndarray:
    tokens, at = np.empty(total, np.int64), 0
    for part, state in zip(slices, states, strict=True):
        tokens[at : at + part.length] = state.tokens[part.start : part.start + part.length]
        at += part.length
        if part.drafts:
            tokens[at : at + len(part.drafts)] = part.drafts
            at += len(part.drafts)
    return tokens


def _sample_rows(
    slices: tuple[Slice, ...], states: list[SequenceState], row_starts: np.ndarray
) -> tuple[tuple[SampleRow, ...], list[int]]:
    samples: list[SampleRow] = []
    rows: list[int] = []
    for part, state, end in zip(slices, states, row_starts[1:].tolist(), strict=True):
        if not part.samples:
            continue
        last_known = end - 1 - len(part.drafts)
        for n in range(len(part.drafts) + 1):
            samples.append(SampleRow(state, state.length + n, part.drafts[:n]))
            rows.append(last_known + n)
    return tuple(samples), rows


def _echo_rows(
    slices: tuple[Slice, ...], states: list[SequenceState], row_starts: np.ndarray
) -> tuple[tuple[tuple[SequenceState, int, int], ...], list[int]]:
    echoes: list[tuple[SequenceState, int, int]] = []
    rows: list[int] = []
    for part, state, begin in zip(slices, states, row_starts.tolist(), strict=False):
        sampling = state.source.sampling
        if not sampling.echo or sampling.logprobs < 0:
            continue
        end = min(part.start + part.length, state.source.prompt_length - 1)
        if end > part.start:
            echoes.append((state, part.start, end))
            rows.extend(range(begin, begin + end - part.start))
    return tuple(echoes), rows
