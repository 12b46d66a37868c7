"""The model card of a checkpoint."""

from __future__ import annotations

import hashlib
import time

from engine.models import Checkpoint
from engine.models.encoder_folder import EncoderCheckpoint
from engine.protocol.messages import PROTOCOL_VERSION, ModelCard

__all__ = ["model_card"]


def model_card(
    checkpoint: Checkpoint | EncoderCheckpoint,
    *,
    name: str,
    context_length: int,
    capabilities: tuple[str, ...],
    price_class: str,
    backend: str = "causal_lm",
    embedding_dimensions: int = 0,
) -> ModelCard:
    """Two engines with the same weights, tokenizer, template and context length publish the same hash."""
    text = checkpoint.text
    identity = f"{PROTOCOL_VERSION} {name} {context_length} {checkpoint.content_hash()}"
    return ModelCard(
        model=name,
        hash=hashlib.sha256(identity.encode()).hexdigest()[:32],
        protocol=PROTOCOL_VERSION,
        context_length=context_length,
        vocab_size=checkpoint.config.vocab_size,
        eos_ids=text.eos_ids,
        bos_id=text.bos_id,
        add_bos=text.add_bos,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        capabilities=capabilities,
        price_class=price_class,
        created_ms=int(time.time() * 1000),
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        backend=backend,
        embedding_dimensions=embedding_dimensions,
        add_eos=text.add_eos,
    )
