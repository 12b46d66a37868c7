"""Embeddings on torch: one-shot work, whole texts packed into a step, no KV."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import torch

from engine.backends.card import model_card
from engine.backends.contract import Capacity, Extras, SequenceInput
from engine.models.bert import Bert
from engine.models.loading import open_encoder
from engine.protocol.messages import ModelCard
from engine.scheduler.step import Slice, StepOutcome, StepPlan

__all__ = ["Embedding", "create"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WAITING_TOKENS = 1 << 19
"""Tokens that may wait in the engine. They hold no memory to speak of; what is not pulled can go to another engine."""


class Embedding:
    """An encoder behind the backend contract. A slice is a whole text and ends it; its vector is in `extras`."""

    def __init__(self, encoder: Bert, card: ModelCard, capacity: Capacity, *, threads: int, fingerprint: str) -> None:
        self.card = card
        self.capacity = capacity
        self.threads = threads
        self._encoder: Bert | None = encoder
        self._fingerprint = fingerprint
        self._texts: dict[int, tuple[int, ...]] = {}
        self._extras = Extras()
        self._thread = 0

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        threads: int,
        dtype: str = "auto",
        model: str = "",
        context_length: int = 0,
        max_rows: int = 2048,
        max_step_tokens: int = 2048,
        price_class: str = "",
    ) -> Embedding:
        """Read a sentence-transformers folder. Raises `ModelError` when it can't be used.

        `dtype` auto is fp32: vectors are kept and compared for years, so they should not depend on the machine.
        0 as `context_length` takes what the model was made for; more is possible up to its positions.
        """
        checkpoint = open_encoder(path)
        torch.set_num_threads(threads)
        dtype = "fp32" if dtype == "auto" else dtype
        if dtype not in _DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}: auto, fp32 or bf16")
        config = checkpoint.config
        name = model or Path(path).name.lower()
        context = min(context_length or config.context_length, config.positions)
        card = model_card(
            checkpoint,
            name=name,
            context_length=context,
            capabilities=("embedding",),
            price_class=price_class or name,
            backend="embedding",
            embedding_dimensions=config.hidden,
        )
        capacity = Capacity(
            block_size=16,
            device_blocks=_WAITING_TOKENS // 16,
            host_blocks=0,
            max_rows=max_rows,
            max_step_tokens=max(max_step_tokens, context),
            context_length=context,
        )
        identity = f"{checkpoint.content_hash()} {dtype}"
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:32]
        return cls(Bert(checkpoint, _DTYPES[dtype]), card, capacity, threads=threads, fingerprint=fingerprint)

    def add(self, sequence: SequenceInput) -> None:
        """Raises ValueError for ids outside the vocabulary: they would fail a whole step."""
        if not all(0 <= token < self.card.vocab_size for token in sequence.tokens):
            raise ValueError(f"a token id is outside the vocabulary of {self.card.vocab_size}")
        self._texts[sequence.sequence] = sequence.tokens

    def execute(self, plan: StepPlan) -> StepOutcome:
        if self._thread != threading.get_ident():  # OpenMP keeps its number of threads for each calling thread
            torch.set_num_threads(self.threads)
            self._thread = threading.get_ident()
        started = time.perf_counter()
        self._extras = Extras()
        for drop in plan.drops:
            self._texts.pop(drop.sequence, None)
        faults = self._embed(plan.slices) if plan.slices else ()
        return StepOutcome(step=plan.step, seconds=time.perf_counter() - started, faults=faults)

    def _embed(self, slices: tuple[Slice, ...]) -> tuple[tuple[int, str], ...]:
        """Vectors of whole texts into `extras`; texts of one length side by side share their attention."""
        if self._encoder is None:
            raise RuntimeError("the backend is closed")
        texts = sorted(((s.sequence, self._texts[s.sequence]) for s in slices), key=lambda text: len(text[1]))
        tokens_T = torch.tensor([token for _, tokens in texts for token in tokens])
        with torch.inference_mode():
            vectors_BD = self._encoder.forward(tokens_T, [len(tokens) for _, tokens in texts])
            finite_B = vectors_BD.isfinite().all(1).tolist()
        vectors: list[list[float]] = vectors_BD.tolist()
        faults: list[tuple[int, str]] = []
        for (sequence, _), vector, finite in zip(texts, vectors, finite_B, strict=True):
            if finite:
                self._extras.vectors[sequence] = vector
            else:
                faults.append((sequence, "the model's numbers overflowed"))
        return tuple(faults)

    def extras(self) -> Extras:
        return self._extras

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self) -> None:
        self._encoder = None


create = Embedding.load
"""What the registry calls."""
