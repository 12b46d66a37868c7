"""What a loader yields: configuration, text assets, and tensors by canonical name, read when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # pulling a model must not wait for torch
    import torch

    from engine.products import Blocks

__all__ = ["Checkpoint", "DecoderConfig", "ModelError", "TextAssets", "need"]


class ModelError(ValueError):
    """A model can't be used; the message says why in one sentence a user can act on."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder-only transformer of the Llama family."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    context_length: int
    rope_base: float
    norm_eps: float
    tied_output: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What a tokenizer is made of. `tokenizer` is the JSON of the Hugging Face `tokenizers` library."""

    tokenizer: str
    chat_template: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    bos_token: str
    eos_token: str
    add_eos: bool = False


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shape of a bidirectional transformer of the BERT family, and how its rows become one vector."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab_size: int
    positions: int
    """Longest input, in tokens, that the weights allow."""
    first_position: int
    """Row of the position table for the first token (RoBERTa begins after its padding)."""
    context_length: int
    """Longest input the model was made for."""
    norm_eps: float
    pooling: str
    """"mean" of all rows, or "cls": the first."""
    normalize: bool


class Checkpoint(Protocol):
    """An opened model. Tensor names are those of Hugging Face's Llama, rotary halves split (not interleaved)."""

    path: Path
    name: str
    config: DecoderConfig
    text: TextAssets

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as float32 (a copy, or memory-mapped when it is stored so). Raises `ModelError` when missing."""
        ...

    def blocks(self, name: str) -> Blocks:
        """One matrix in blocks of 4 or 8 bits: as it is stored, or rounded to 8. Raises `ModelError`."""
        ...

    def content_hash(self) -> str:
        """SHA-256 of what the model is made of, hexadecimal."""
        ...


def need(values: dict[str, Any], key: str, kind: type | tuple[type, ...], what: str) -> Any:
    """A required value of the right type. Raises `ModelError`."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ModelError(f"{what}: {key} is {'missing' if value is None else f'not usable ({value!r:.40})'}")
    return value
