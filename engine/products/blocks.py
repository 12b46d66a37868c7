"""Matrices whose rows are blocks of 32 levels that share a scale: the layouts Q4_1 and Q8_0 of GGUF.

Source: ggml-common.h of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "BLOCK_BYTES", "Blocks"]

BLOCK = 32
BLOCK_BYTES = {4: 20, 8: 34}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [O, I]. `rows` is uint8 [O, I/32 · bytes of a block].

    A block of 4 bits: half scale, half least, 16 bytes whose low halves are inputs 0 to 15; w = scale · level + least.
    A block of 8 bits: half scale, 32 signed levels; w = scale · level.
    """

    bits: int
    rows: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.rows.shape[1] // BLOCK_BYTES[self.bits] * BLOCK

    @staticmethod
    def rounded(weight_OI: Tensor) -> Blocks:
        """Float32 weights to the nearest of 8-bit levels. Raises ValueError when a row isn't whole blocks."""
        outputs, inputs = weight_OI.shape
        if inputs % BLOCK:
            raise ValueError(f"rows of {inputs} numbers are not whole blocks of {BLOCK}")
        blocks_OBb = weight_OI.float().reshape(outputs, -1, BLOCK)
        scale_OB1 = (blocks_OBb.abs().amax(-1, keepdim=True) / 127).half()
        inverse_OB1 = torch.where(scale_OB1 > 0, 1 / scale_OB1.float(), 0.0)
        levels_OBb = (blocks_OBb * inverse_OB1).round_().clamp_(-127, 127).to(torch.int8)
        rows = torch.cat([scale_OB1.view(torch.uint8), levels_OBb.view(torch.uint8)], dim=-1)
        return Blocks(8, rows.reshape(outputs, -1))

    @staticmethod
    def stacked(parts: Sequence[Blocks]) -> Blocks:
        """One matrix with the outputs of all; parts of unequal bits are rounded to 8."""
        if len({part.bits for part in parts}) > 1:
            parts = [part if part.bits == 8 else Blocks.rounded(part.floats()) for part in parts]
        return Blocks(parts[0].bits, torch.cat([part.rows for part in parts]))

    def floats(self) -> Tensor:
        """float32 [O, I]"""
        blocks_OBn = self.rows.reshape(self.rows.shape[0], -1, BLOCK_BYTES[self.bits])
        scale_OB1 = blocks_OBn[..., :2].contiguous().view(torch.float16).float()
        if self.bits == 8:
            return (blocks_OBn[..., 2:].view(torch.int8).float() * scale_OB1).flatten(1)
        least_OB1 = blocks_OBn[..., 2:4].contiguous().view(torch.float16).float()
        levels_OBb = torch.cat([blocks_OBn[..., 4:] & 15, blocks_OBn[..., 4:] >> 4], dim=-1)
        return (levels_OBb.float() * scale_OB1 + least_OB1).flatten(1)
