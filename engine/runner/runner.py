"""Executes step plans on a causal language model."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from engine.attention import PagedBatch
from engine.backends.contract import Extras, SequenceInput, TokenInfo
from engine.models.architectures import Decoder
from engine.runner.batch import PackedStep, SampleRow, pack
from engine.runner.grammar import Grammars, Masks
from engine.runner.memory import KVMemory
from engine.runner.sampler import Sampler, token_infos
from engine.runner.sequences import Sequences, SequenceState
from engine.scheduler.step import Sample, StepOutcome, StepPlan

__all__ = ["Runner"]


class Runner:
    """The order of a step is the plan's: drops, parks, restores, starts, extends, copies, then the slices."""

    def __init__(
        self, model: Decoder, memory: KVMemory, sampler: Sampler, grammars: Grammars, max_blocks_per_sequence: int
    ) -> None:
        self._model = model
        self._memory = memory
        self._sampler = sampler
        self.grammars = grammars
        self._sequences = Sequences(max_blocks_per_sequence)
        self._extras = Extras()

    def add(self, sequence: SequenceInput) -> None:
        self._sequences.add(sequence)

    def extras(self) -> Extras:
        return self._extras

    def execute(self, plan: StepPlan) -> StepOutcome:
        began = time.perf_counter()
        self._extras = Extras()
        self._arrange(plan)
        samples, faults = self._compute(plan) if plan.slices else ((), ())
        return StepOutcome(plan.step, samples, time.perf_counter() - began, faults=faults)

    def _arrange(self, plan: StepPlan) -> None:
        sequences, memory = self._sequences, self._memory
        for drop in plan.drops:
            sequences.drop(drop.sequence)
            self.grammars.drop(drop.sequence)
        for park in plan.parks:
            memory.park(park.device, park.host)
            sequences[park.sequence].set_blocks(())
        for restore in plan.restores:
            memory.restore(restore.host, restore.device)
            sequences[restore.sequence].set_blocks(restore.device)
        for start in plan.starts:
            sequences[start.sequence].set_blocks(start.blocks)
        for extend in plan.extends:
            sequences[extend.sequence].add_blocks(extend.blocks)
        memory.copy((copy.source, copy.target) for copy in plan.copies)
        for copy in plan.copies:
            sequences[copy.sequence].blocks[copy.index] = copy.target
        memory.fence()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[tuple[Sample, ...], tuple[tuple[int, str], ...]]:
        step = pack(plan.slices, self._sequences, self._memory.store.block_size)
        pending = self.grammars.start(step.samples)
        logits_RV = self._forward(step)
        if logits_RV is None:
            return (), ()
        count = len(step.samples)
        self._echo(step, logits_RV[count:])
        masks = pending.result() if pending is not None else None
        tokens, sound = self._sampler.sample(logits_RV[:count], step.samples, masks)
        faults = _faults(step.samples, sound, masks)
        accepted = _accepted(step.samples, tokens)
        self._report(logits_RV, step.samples, tokens, accepted)
        samples: dict[int, list[int]] = {}
        states: dict[int, SequenceState] = {}
        for r in accepted:
            state = step.samples[r].state
            states[state.source.sequence] = state
            samples.setdefault(state.source.sequence, []).append(tokens[r])
        for number, new in samples.items():
            if number not in faults:
                states[number].append(new)
        return (
            tuple(Sample(number, tuple(new)) for number, new in samples.items() if number not in faults),
            tuple(sorted(faults.items())),
        )

    def _forward(self, step: PackedStep) -> Tensor | None:
        """Logits on the host, where they are sampled."""
        upload, batch = self._memory.device.upload, step.batch
        placed = PagedBatch(
            row_starts=upload(batch.row_starts),
            contexts=upload(batch.contexts),
            tables=upload(batch.tables),
            positions=upload(batch.positions),
            slots=upload(batch.slots),
        )
        rows = upload(step.logit_rows) if step.logit_rows is not None else None
        logits_RV = self._model.forward(upload(step.tokens), placed, self._memory.store, rows)
        return logits_RV.cpu() if logits_RV is not None else None

    def _echo(self, step: PackedStep, logits_RV: Tensor) -> None:
        """Log-probabilities of prompt tokens, for requests that want their prompt back."""
        at = 0
        for state, first, end in step.echoes:
            rows = logits_RV[at : at + end - first]
            at += end - first
            following = state.tokens[first + 1 : end + 1].tolist()
            infos = token_infos(rows, following, [state.source.sampling.logprobs] * len(following))
            self._add_infos(state, infos)

    def _report(self, logits_RV: Tensor, rows: tuple[SampleRow, ...], tokens: list[int], accepted: list[int]) -> None:
        wanted = [r for r in accepted if rows[r].state.source.sampling.logprobs >= 0]
        if not wanted:
            return
        infos = token_infos(
            logits_RV[wanted], [tokens[r] for r in wanted], [rows[r].state.source.sampling.logprobs for r in wanted]
        )
        for r, info in zip(wanted, infos, strict=True):
            self._add_infos(rows[r].state, [info])

    def _add_infos(self, state: SequenceState, infos: list[TokenInfo]) -> None:
        known = self._extras.logprobs.get(state.source.sequence, ())
        self._extras.logprobs[state.source.sequence] = (*known, *infos)


def _faults(rows: tuple[SampleRow, ...], sound: list[bool], masks: Masks | None) -> dict[int, str]:
    """Sequences that can't go on, and why."""
    faults = {
        row.state.source.sequence: "the model's output is not a number"
        for row, ok in zip(rows, sound, strict=True)
        if not ok
    }
    if masks is not None:
        faults |= {rows[r].state.source.sequence: reason for r, reason in masks.faults.items()}
    return faults


def _accepted(rows: tuple[SampleRow, ...], tokens: list[int]) -> list[int]:
    """Rows whose token stands: a row after a draft counts only if every draft before it was what would be sampled.

    Randomness belongs to the position, so this yields exactly the tokens that sampling one by one would.
    """
    accepted: list[int] = []
    broken: SequenceState | None = None
    for r, row in enumerate(rows):
        if row.drafts and (row.state is broken or tokens[r - 1] != row.drafts[-1]):
            broken = row.state
            continue
        accepted.append(r)
    return accepted
