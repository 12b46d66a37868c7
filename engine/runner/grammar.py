"""Which tokens the constrained rows of a step may take, computed beside the forward pass.

A matcher's state is a function of the output tokens: it is caught up before each use, so that parking, recompute and a
re-dispatch with tokens already delivered need nothing of their own. Only the masking thread touches matchers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.protocol.messages import ModelCard
from engine.runner.batch import SampleRow
from engine.text import Tokenizer
from engine.text.grammar import ConstraintError, Grammar, Trial, TrialError, Vocabulary

__all__ = ["Grammars", "Masks"]

_KEPT = 256
"""Compiled constraints kept for the next request that brings the same one."""


_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_BIAS_OF_BYTE = np.where(np.unpackbits(_BYTES, axis=1, bitorder="little") > 0, np.float32(0), np.float32("-inf"))
"""Eight tokens at a time: [256, 8]."""


@dataclass(slots=True)
class Masks:
    """`bias_GV`: for each of the constrained `rows`, 0 for a token that may follow and -inf for any other.

    `faults`: rows that can't go on.
    """

    rows: list[int]
    bias_GV: Tensor
    faults: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: list[int], words_GW: np.ndarray, vocabulary: int, faults: dict[int, str]) -> Masks:
        """From bits. Adding is 25 times faster on a CPU than filling by a mask, and this part needn't be waited for."""
        bias = _BIAS_OF_BYTE[words_GW.view(np.uint8)].reshape(len(rows), -1)[:, :vocabulary]
        return cls(rows, torch.from_numpy(bias), faults)

    def apply(self, logits_RV: Tensor) -> Tensor:
        """The logits with -inf for what may not follow; the given ones stay as they are."""
        bias_GV = self.bias_GV.to(logits_RV)
        if len(self.rows) == len(logits_RV):
            return logits_RV + bias_GV
        logits_RV = logits_RV.clone()
        for bias_V, r in zip(bias_GV, self.rows, strict=True):
            logits_RV[r] += bias_V
        return logits_RV


@dataclass(slots=True)
class _Live:
    grammar: Grammar
    consumed: int = 0
    fault: str = ""


class Grammars:
    """All constraints of one runner: compiled once each, followed once per sequence."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._trial = Trial(card)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._waiting: dict[str, list[Callable[[str], None]]] = {}
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._live: dict[int, _Live] = {}

    def close(self) -> None:
        self._trial.close()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._masker.shutdown(wait=False, cancel_futures=True)

    # Compiling ---------------------------------------------------------------------------------------------------

    def prepare(self, constraint: str, done: Callable[[str], None]) -> bool:
        """True when it is compiled. Else `done` is called later, from another thread: "" or the reason against it."""
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
                return True
            waiting = self._waiting.setdefault(constraint, [])
            waiting.append(done)
            if len(waiting) == 1:
                self._compiler.submit(self._compile, constraint)
        return False

    def _compile(self, constraint: str) -> None:
        try:
            reason = self._trial.refusal(constraint)
            if reason is None:
                self._keep(constraint, self._new(constraint))
        except (ConstraintError, TrialError) as error:
            reason = str(error)
        with self._lock:
            waiting = self._waiting.pop(constraint)
        for done in waiting:
            done(reason or "")

    def _new(self, constraint: str) -> Grammar:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(Tokenizer(self._card))
        grammar = self._vocabulary.compile(constraint)
        grammar.fill(np.empty(self._vocabulary.words, np.int32))  # the first mask costs most: copies share its work
        return grammar

    def _keep(self, constraint: str, grammar: Grammar) -> None:
        with self._lock:
            self._compiled[constraint] = grammar
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)

    # Masking -----------------------------------------------------------------------------------------------------

    def start(self, rows: Sequence[SampleRow]) -> Future[Masks] | None:
        """Begin to compute the masks of these rows; None when none of them is constrained.

        The sequences must not change until the result is there.
        """
        constrained = [r for r, row in enumerate(rows) if row.state.source.sampling.grammar]
        return self._masker.submit(self._masks, rows, constrained) if constrained else None

    def drop(self, sequence: int) -> None:
        """The sequence has ended."""
        self._live.pop(sequence, None)

    def _masks(self, rows: Sequence[SampleRow], constrained: list[int]) -> Masks:
        words = -(-self._card.vocab_size // 32)
        masks = np.full((len(constrained), words), -1, np.int32)
        faults: dict[int, str] = {}
        for mask, r in zip(masks, constrained, strict=True):
            live = self._follow(rows[r])
            if not live.fault:
                try:
                    _fill(live, rows[r], mask)
                except ConstraintError as error:
                    live.fault = f"the answer can't go on: {error}"
            if live.fault:
                faults[r] = live.fault
        return Masks.of(constrained, masks, self._card.vocab_size, faults)

    def _follow(self, row: SampleRow) -> _Live:
        source = row.state.source
        live = self._live.get(source.sequence)
        if live is None:
            with self._lock:
                grammar = self._compiled.get(source.sampling.grammar)
            if grammar is None:  # pushed out by others since it was prepared
                grammar = self._new(source.sampling.grammar)
                self._keep(source.sampling.grammar, grammar)
            live = self._live[source.sequence] = _Live(grammar.copy())
        return live


def _fill(live: _Live, row: SampleRow, mask: np.ndarray) -> None:
    """The mask for the row's position. A row after a draft that is not allowed stays open: it won't be accepted."""
    output = row.state.output
    if len(output) > live.consumed:
        live.grammar.push(output[live.consumed :].tolist())
        live.consumed = len(output)
    if not row.drafts:
        live.grammar.fill(mask)
    elif live.grammar.accepted(row.drafts) == len(row.drafts):
        live.grammar.push(row.drafts)
        live.grammar.fill(mask)
        live.grammar.rollback(len(row.drafts))
