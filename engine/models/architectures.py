"""Architecture names to model classes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.attention import HeadShape, Kernels, KVStore, PagedBatch
from engine.models.checkpoint import Checkpoint, DecoderConfig, ModelError
from engine.models.linear import int8_refusal
from engine.models.llama import Llama

__all__ = ["Decoder", "build_decoder"]

_CLASSES = {"llama": Llama, "qwen2": Llama, "qwen3": Llama}


class Decoder(Protocol):
    """A causal language model over paged KV."""

    config: DecoderConfig
    shape: HeadShape
    dtype: torch.dtype

    def forward(self, tokens_T: Tensor, batch: PagedBatch, store: KVStore, rows_R: Tensor | None) -> Tensor | None:
        """Float32 logits [R, vocabulary] of the packed rows `rows_R`; None when no row is asked for."""
        ...


def build_decoder(
    checkpoint: Checkpoint,
    kernels: Kernels,
    dtype: torch.dtype,
    context_length: int,
    *,
    quantization: str = "none",
    device: str = "cpu",
) -> Decoder:
    """The model of a checkpoint, its weights read; `quantization` is none or int8. Raises `ModelError`."""
    if quantization not in ("none", "int8"):
        raise ModelError(f"unknown quantization {quantization!r}: none or int8")
    if quantization == "int8" and (reason := int8_refusal(device)):
        raise ModelError(reason)
    kind = _CLASSES.get(checkpoint.config.architecture)
    if kind is None:
        raise ModelError(f"{checkpoint.path}: the architecture {checkpoint.config.architecture!r} is not supported")
    return kind(checkpoint, kernels, dtype, context_length, int8=quantization == "int8", device=device)
