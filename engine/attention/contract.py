"""What a kernel set is given and must return. `reference` is the specification of each operation.

Shape suffixes: T packed tokens, R rows (one per sequence in the step), D hidden, E = (heads + 2 kv heads) · head size,
B blocks of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["HeadShape", "KVStore", "Kernels", "PagedBatch"]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`heads` query heads share `kv_heads` key/value heads in equal groups, in order."""

    heads: int
    kv_heads: int
    head_dim: int


class KVStore:
    """Keys and values of all layers, block-major: one block is one contiguous run of bytes.

    `data[block, layer, 0 key | 1 value, kv_head, offset in block, head_dim]`. Keys are stored rotated. A kernel set may
    arrange the numbers of one (block, layer, key, head) otherwise; everybody else moves whole blocks or asks `read`.
    """

    def __init__(
        self,
        blocks: int,
        layers: int,
        shape: HeadShape,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        size = (blocks, layers, 2, shape.kv_heads, block_size, shape.head_dim)
        self.data = torch.empty(size, dtype=dtype, device=device)

    @staticmethod
    def block_bytes(layers: int, shape: HeadShape, block_size: int, dtype: torch.dtype) -> int:
        return layers * 2 * shape.kv_heads * block_size * shape.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where the packed tokens of a step belong. Row r owns tokens `row_starts[r]` to `row_starts[r + 1]`.

    Its tokens are the last ones of a context of `contexts[r]` tokens, whose keys and values lie in the blocks
    `tables[r]` (entries beyond the context are arbitrary valid ids). A token attends to itself and all before it.
    """

    row_starts: Tensor
    """int32 [R + 1]"""
    contexts: Tensor
    """int32 [R]"""
    tables: Tensor
    """int32 [R, B]"""
    positions: Tensor
    """int32 [T]: place in the sequence"""
    slots: Tensor
    """int64 [T]: block · block size + offset of the token's own key and value"""


class Kernels(Protocol):
    """Operations between the matrix products of a layer. All of them run on packed tokens; none pads."""

    name: str

    def add_rms_norm(self, residual_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """Add `delta` to the float32 `residual` in place; return its RMS norm times `weight`, in the model's dtype."""
        ...

    def rotate_and_store(
        self, qkv_TE: Tensor, rotary_PD: Tensor, batch: PagedBatch, store: KVStore, layer: int
    ) -> None:
        """Rotate queries in place; rotate keys and put them and the values into the store.

        `rotary[p]` is float32: head_dim/2 cosines, then as many sines, of position p.
        """
        ...

    def attention(self, qkv_TE: Tensor, batch: PagedBatch, store: KVStore, layer: int) -> Tensor:
        """[T, heads · head_dim]: softmax(q·kᵀ / √head_dim)·v over each token's context, accumulated in float32."""
        ...

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """[T, F/2]: silu(first half) times second half."""
        ...

    def read(self, store: KVStore, blocks_N: Tensor) -> Tensor:
        """[N · block size, layers, 2, kv_heads, head_dim]: what these blocks hold, by token, for comparison."""
        ...
