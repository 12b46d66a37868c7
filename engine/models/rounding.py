"""Matrices of a checkpoint in blocks of 4 or 8 bits: kept when the file has them so, rounded to 8 bits otherwise."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from engine.models.checkpoint import ModelError
from engine.products import Blocks

__all__ = ["as_stored", "rounded"]

_KINDS = {gguf.GGMLQuantizationType.Q4_1: 4, gguf.GGMLQuantizationType.Q8_0: 8}
_Q4_0_BYTES = 18


def as_stored(kind: gguf.GGMLQuantizationType, raw: np.ndarray) -> Blocks | None:
    """The very numbers of a GGUF matrix; None when its type has no such blocks."""
    if raw.ndim != 2:
        return None
    if kind == gguf.GGMLQuantizationType.Q4_0:
        return Blocks(4, _with_least(torch.from_numpy(raw.copy())))
    return Blocks(_KINDS[kind], torch.from_numpy(raw.copy())) if kind in _KINDS else None


def _with_least(rows: Tensor) -> Tensor:
    """Q4_0 (half scale, 16 bytes; levels around 8) as Q4_1 with a least of -8 scales, which is exact."""
    blocks = rows.reshape(rows.shape[0], -1, _Q4_0_BYTES)
    least = (blocks[..., :2].contiguous().view(torch.float16).float() * -8).half().view(torch.uint8)
    return torch.cat([blocks[..., :2], least, blocks[..., 2:]], dim=-1).flatten(1)


def rounded(weight_OI: Tensor, what: str) -> Blocks:
    """Raises `ModelError` for rows that aren't whole blocks."""
    try:
        return Blocks.rounded(weight_OI)
    except ValueError as error:
        raise ModelError(f"{what}: int8 is not possible: {error}") from error
