"""The operations in plain torch: the specification the other kernels are tested against, and the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.contract import KVStore, PagedBatch

__all__ = ["ReferenceKernels"]


class ReferenceKernels:
    """Runs on any device torch runs on. Row by row where sequences differ in length: clear first."""

    name = "reference"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def add_rms_norm(self, residual_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        if delta_TD is not None:
            residual_TD += delta_TD
        scale_T1 = torch.rsqrt(residual_TD.square().mean(-1, keepdim=True) + eps)
        return (residual_TD * scale_T1 * weight_D).to(self._dtype)

    def rotate_and_store(
        self, qkv_TE: Tensor, rotary_PD: Tensor, batch: PagedBatch, store: KVStore, layer: int
    ) -> None:
        shape = store.shape
        heads_THd = qkv_TE.view(qkv_TE.shape[0], -1, shape.head_dim)
        rotated = shape.heads + shape.kv_heads
        cos_T1d, sin_T1d = rotary_PD[batch.positions].unsqueeze(1).chunk(2, dim=-1)
        first, second = heads_THd[:, :rotated].float().chunk(2, dim=-1)
        turned = torch.cat([first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d], dim=-1)
        heads_THd[:, :rotated] = turned.to(qkv_TE.dtype)
        block_T = torch.div(batch.slots, store.block_size, rounding_mode="floor")
        offset_T = batch.slots % store.block_size
        store.data[block_T, layer, 0, :, offset_T] = heads_THd[:, shape.heads : rotated]
        store.data[block_T, layer, 1, :, offset_T] = heads_THd[:, rotated:]

    def attention(self, qkv_TE: Tensor, batch: PagedBatch, store: KVStore, layer: int) -> Tensor:
        shape = store.shape
        width = shape.heads * shape.head_dim
        out_TD = torch.empty(qkv_TE.shape[0], width, dtype=qkv_TE.dtype, device=qkv_TE.device)
        starts, contexts = batch.row_starts.tolist(), batch.contexts.tolist()
        for row, context in enumerate(contexts):
            begin, end = starts[row], starts[row + 1]
            blocks = batch.tables[row, : -(-context // store.block_size)].long()
            kv = store.data[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].float()
            out_TD[begin:end] = _attend(qkv_TE[begin:end, :width].float(), kv[0], kv[1], shape.head_dim).to(
                out_TD.dtype
            )
        return out_TD

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(self._dtype)

    def read(self, store: KVStore, blocks_N: Tensor) -> Tensor:
        return store.data[blocks_N].movedim(4, 1).flatten(0, 1)


def _attend(q_TD: Tensor, k_HCd: Tensor, v_HCd: Tensor, head_dim: int) -> Tensor:
    """One sequence: its last T tokens attend causally to a context of C; H key/value heads."""
    tokens, (kv_heads, context, _) = q_TD.shape[0], k_HCd.shape
    q_HgTd = q_TD.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = q_HgTd @ k_HCd.unsqueeze(1).transpose(-1, -2) * head_dim**-0.5
    if tokens > 1:
        future = torch.ones(tokens, context, dtype=torch.bool, device=q_TD.device).triu(context - tokens + 1)
        scores.masked_fill_(future, float("-inf"))
    out_HgTd = torch.softmax(scores, dim=-1) @ v_HCd.unsqueeze(1)
    return out_HgTd.permute(2, 0, 1, 3).reshape(tokens, -1)
