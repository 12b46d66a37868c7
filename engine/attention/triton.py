"""Rotary + store and variable-length paged attention as Triton kernels, over the same block-major store.

One launch serves prompts, chunks and decodes together. The query heads that share a key/value head are packed into one
tile, so that keys and values are read once for all of them. Nothing here waits for the device: the tile of a program is
found on the device, and the grid is an upper bound that needs no lengths.

Imported only when these kernels are chosen. With TRITON_INTERPRET=1 they run on a CPU, which is how they are tested.
Only what Triton 3.6 has is used.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.contract import HeadShape, KVStore, PagedBatch
from engine.attention.reference import ReferenceKernels

__all__ = ["TritonKernels", "compile_ahead"]

_KEYS = 64
"""Keys in a round of the online softmax."""
_QUERIES = 64
"""Query rows (tokens times heads of a group) in a tile of a prompt; a decode step takes one token a tile."""


@triton.jit
def rotate_and_store_kernel(
    qkv,
    rotary,
    positions,
    slots,
    data,
    block_stride,
    layer_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """One token: its query and key heads turned, keys and values put into their slot."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    head = tl.arange(0, HEADS_PADDED)[:, None]
    lane = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (lane < half)
    turned = head < HEADS + KV_HEADS
    at = qkv + token * (HEADS + 2 * KV_HEADS) * DIM + head * DIM + lane
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + half, mask=inside, other=0.0)
    angle = rotary + tl.load(positions + token).to(tl.int64) * DIM + lane
    cosine = tl.load(angle, mask=lane < half, other=0.0)
    sine = tl.load(angle + half, mask=lane < half, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(turned, (a * cosine - b * sine).to(first.dtype), first)
    second = tl.where(turned, (b * cosine + a * sine).to(second.dtype), second)
    tl.store(at, first, mask=inside & turned)
    tl.store(at + half, second, mask=inside & turned)
    slot = tl.load(slots + token)
    kept = head - HEADS  # keys of all heads, then values, as in the store
    target = data + (slot // BLOCK) * block_stride + layer_offset + (kept * BLOCK + slot % BLOCK) * DIM + lane
    tl.store(target, first, mask=inside & (kept >= 0))
    tl.store(target + half, second, mask=inside & (kept >= 0))


@triton.jit
def attention_kernel(
    qkv,
    out,
    row_starts,
    contexts,
    tables,
    data,
    rows,
    table_width,
    block_stride,
    layer_offset,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """`TOKENS` tokens of one row, with the query heads of one key/value head: at most `TILE` queries."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    low = 0  # the last row whose tiles begin at or before this one; tiles of row r begin at starts[r] // TOKENS + r
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(row_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    begin = tl.load(row_starts + low)
    tokens = tl.load(row_starts + low + 1) - begin
    first = (tile - (begin // TOKENS + low)) * TOKENS
    if first < tokens:
        context = tl.load(contexts + low)
        query = tl.arange(0, TILE)
        token = first + query // group
        head = kv_head * group + query % group
        lane = tl.arange(0, DIM_PADDED)
        mine = (query < TOKENS * group) & (token < tokens)
        mask = mine[:, None] & (lane < DIM)[None, :]
        row = (begin + token).to(tl.int64)
        at = qkv + row[:, None] * (HEADS + 2 * KV_HEADS) * DIM + head[:, None] * DIM + lane[None, :]
        q = tl.load(at, mask=mask, other=0.0)
        sees = context - tokens + token + 1  # keys that a query may see
        end = tl.minimum(context - tokens + first + TOKENS, context)
        top = tl.full([TILE], float("-inf"), tl.float32)
        mass = tl.zeros([TILE], tl.float32)
        result = tl.zeros([TILE, DIM_PADDED], tl.float32)
        head_keys = data + layer_offset + kv_head * BLOCK * DIM
        for start in range(0, end, KEYS):
            key = start + tl.arange(0, KEYS)
            block = tl.load(tables + tl.cast(low, tl.int64) * table_width + key // BLOCK, mask=key < end, other=0)
            place = block.to(tl.int64) * block_stride + (key % BLOCK) * DIM
            there = (key < end)[:, None] & (lane < DIM)[None, :]
            source = head_keys + place[:, None] + lane[None, :]
            k = tl.load(source, mask=there, other=0.0)
            v = tl.load(source + KV_HEADS * BLOCK * DIM, mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(key[None, :] < sees[:, None], scores, float("-inf"))
            peak = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp(top - peak)
            weights = tl.exp(scores - peak[:, None])
            mass = mass * shrink + tl.sum(weights, 1)
            result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = peak
        target = out + row[:, None] * HEADS * DIM + head[:, None] * DIM + lane[None, :]
        tl.store(target, (result / mass[:, None]).to(q.dtype), mask=mask)


def rotate_constants(shape: HeadShape, block_size: int) -> dict[str, int]:
    """The compile-time sizes of `rotate_and_store_kernel`."""
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "BLOCK": block_size,
        "HEADS_PADDED": triton.next_power_of_2(shape.heads + 2 * shape.kv_heads),
        "HALF_PADDED": triton.next_power_of_2(shape.head_dim // 2),
    }


def attention_constants(shape: HeadShape, block_size: int, *, decode: bool) -> dict[str, int]:
    """The compile-time sizes of `attention_kernel`; `decode` when every row has one token."""
    group = shape.heads // shape.kv_heads
    tokens = 1 if decode else max(1, _QUERIES // group)
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "BLOCK": block_size,
        "DIM_PADDED": max(16, triton.next_power_of_2(shape.head_dim)),
        "TOKENS": tokens,
        "TILE": max(16, triton.next_power_of_2(tokens * group)),  # 16: the least a matrix instruction takes
        "KEYS": _KEYS if shape.head_dim <= 128 else _KEYS // 2,
    }


class TritonKernels(ReferenceKernels):
    """Norm and activation are those of the reference: torch runs them on the device as they are."""

    name = "triton"

    def rotate_and_store(
        self, qkv_TE: Tensor, rotary_PD: Tensor, batch: PagedBatch, store: KVStore, layer: int
    ) -> None:
        if not qkv_TE.shape[0]:
            return
        rotate_and_store_kernel[(qkv_TE.shape[0],)](
            qkv_TE,
            rotary_PD,
            batch.positions,
            batch.slots,
            store.data,
            store.data.stride(0),
            layer * store.data.stride(1),
            **rotate_constants(store.shape, store.block_size),
        )

    def attention(self, qkv_TE: Tensor, batch: PagedBatch, store: KVStore, layer: int) -> Tensor:
        shape, (rows, width), total = store.shape, batch.tables.shape, qkv_TE.shape[0]
        out_TD = torch.empty(total, shape.heads * shape.head_dim, dtype=qkv_TE.dtype, device=qkv_TE.device)
        constants = attention_constants(shape, store.block_size, decode=total == rows)
        tiles = total // constants["TOKENS"] + rows  # never fewer than there are: a row wastes less than one
        attention_kernel[(tiles, shape.kv_heads)](
            qkv_TE,
            out_TD,
            batch.row_starts,
            batch.contexts,
            batch.tables,
            store.data,
            rows,
            width,
            store.data.stride(0),
            layer * store.data.stride(1),
            shape.head_dim**-0.5,
            **constants,
        )
        return out_TD


def compile_ahead(capability: int, element: str, shape: HeadShape, block_size: int, *, decode: bool) -> dict[str, Any]:
    """The kernels by name, compiled for NVIDIA compute capability 80, 90, …; `element` is bf16, fp16 or fp32.

    Needs no device, so an image can be checked, or its cache filled, where it is built.
    """
    pointers = {"qkv": f"*{element}", "out": f"*{element}", "data": f"*{element}", "rotary": "*fp32", "slots": "*i64"}
    numbers = {"rows": "i32", "table_width": "i32", "block_stride": "i64", "layer_offset": "i64", "scale": "fp32"}
    compiled = {}
    for kernel, constants in (
        (rotate_and_store_kernel, rotate_constants(shape, block_size)),
        (attention_kernel, attention_constants(shape, block_size, decode=decode)),
    ):
        known = pointers | numbers | dict.fromkeys(constants, "constexpr")
        signature = {name: known.get(name, "*i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled[kernel.fn.__name__] = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return compiled
