"""Embeddings on torch: one-shot work, whole texts packed into a step, no KV."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.card import model_card
from engine.backends.contract import Capacity, SequenceInput
from engine.backends.one_shot import DTYPES, OneShot, dtype_of
from engine.models.bert import Bert
from engine.models.loading import open_encoder

__all__ = ["Embedding", "create"]

_WAITING_TOKENS = 1 << 19
"""Tokens that may wait in the engine. They hold no memory to speak of; what is not pulled can go to another engine."""


class Embedding(OneShot[tuple[int, ...], Bert]):
    """An encoder behind the backend contract. A slice is a whole text and ends it; its vector is in `extras`."""

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
        dtype = dtype_of(dtype)
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
        return cls(Bert(checkpoint, DTYPES[dtype]), card, capacity, threads=threads, fingerprint=fingerprint)

    def add(self, sequence: SequenceInput) -> None:
        """Raises ValueError for ids outside the vocabulary: they would fail a whole step."""
        if not all(0 <= token < self.card.vocab_size for token in sequence.tokens):
            raise ValueError(f"a token id is outside the vocabulary of {self.card.vocab_size}")
        self._inputs[sequence.sequence] = sequence.tokens

    def _rows(self, model: Bert, inputs: list[tuple[int, ...]]) -> Tensor:
        """Vectors [texts, dimensions]; texts of one length side by side share their attention."""
        order = sorted(range(len(inputs)), key=lambda one: len(inputs[one]))
        tokens_T = torch.tensor([token for one in order for token in inputs[one]])
        vectors_BD = model.forward(tokens_T, [len(inputs[one]) for one in order])
        rows_BD = torch.empty_like(vectors_BD)
        rows_BD[torch.tensor(order)] = vectors_BD
        return rows_BD


create = Embedding.load
"""What the registry calls."""
