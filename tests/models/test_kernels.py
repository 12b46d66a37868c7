"""The compiled kernels against the reference, over shapes, lengths and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import HeadShape, KVStore, PagedBatch, choose_kernels
from engine.attention.cpu import CpuKernels
from engine.attention.reference import ReferenceKernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
shapes = st.sampled_from([HeadShape(9, 3, 64), HeadShape(4, 4, 32), HeadShape(8, 1, 128), HeadShape(14, 2, 64)])
rows = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=5)  # (new tokens, before)


def batch_of(lengths: list[int], contexts: list[int], tables: torch.Tensor, block: int) -> PagedBatch:
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)])
    return PagedBatch(
        row_starts=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        contexts=torch.tensor(contexts, dtype=torch.int32),
        tables=tables,
        positions=positions.int(),
        slots=tables[row, positions // block].long() * block + positions % block,
    )


@settings(derandomize=True, max_examples=25, deadline=None)
@given(shapes, rows, st.sampled_from([16, 32]), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_attention_and_store(
    shape: HeadShape, parts: list[tuple[int, int]], block: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    ours, wanted = CpuKernels(dtype, 2), ReferenceKernels(dtype)
    lengths, contexts = [n for n, _ in parts], [n + before for n, before in parts]
    counts = [-(-c // block) for c in contexts]
    order, tables = torch.randperm(sum(counts)).int(), torch.zeros(len(parts), max(counts), dtype=torch.int32)
    for row, end in enumerate(np.cumsum(counts)):
        tables[row, : counts[row]] = order[end - counts[row] : end]
    stores = [KVStore(sum(counts), 2, shape, block, dtype) for _ in range(2)]
    for store in stores:
        store.data.fill_(float("nan"))  # what was never written must never be read into a result
    rotary = torch.randn(400, shape.head_dim)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for part in (contexts, lengths):  # the whole context first, then its last tokens again as a chunk
        batch = batch_of(part, contexts, tables, block)
        mine = torch.randn(sum(part), width).to(dtype)
        theirs = mine.clone()
        ours.rotate_and_store(mine, rotary, batch, stores[0], 1)
        wanted.rotate_and_store(theirs, rotary, batch, stores[1], 1)
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        result = ours.attention(mine, batch, stores[0], 1)
        torch.testing.assert_close(
            result, wanted.attention(theirs, batch, stores[1], 1), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
    blocks = torch.arange(sum(counts))
    kept = [kernels.read(store, blocks)[:, 1] for kernels, store in zip((ours, wanted), stores, strict=True)]
    torch.testing.assert_close(*kept, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_activation(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ours, wanted = CpuKernels(dtype, 2), ReferenceKernels(dtype)
    residual, delta, weight = torch.randn(70, 576), torch.randn(70, 576).to(dtype), torch.rand(576)
    copy = residual.clone()
    for change in (None, delta):
        torch.testing.assert_close(
            ours.add_rms_norm(residual, change, weight, 1e-5), wanted.add_rms_norm(copy, change, weight, 1e-5)
        )
        torch.testing.assert_close(residual, copy)
    gate_up = (torch.randn(70, 3072) * 30).to(dtype)
    torch.testing.assert_close(ours.silu_mul(gate_up), wanted.silu_mul(gate_up), atol=1e-5, rtol=8e-3)


def test_without_a_compiler_the_reference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    sizes = {"block_size": 16, "widths": (64,), "threads": 1}
    assert choose_kernels("auto", torch.float32, HeadShape(2, 1, 32), **sizes).name == "reference"
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        choose_kernels("cpu", torch.float32, HeadShape(2, 1, 32), **sizes)
    with pytest.raises(ValueError, match="unknown kernels"):
        choose_kernels("fast", torch.float32, HeadShape(2, 1, 32), **sizes)
