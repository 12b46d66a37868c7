"""Run in a process of its own: `TRITON_INTERPRET=1` must be set before Triton is imported."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.attention import HeadShape, KVStore, PagedBatch
from engine.attention.reference import ReferenceKernels
from engine.attention.triton import TritonKernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter multiplies bfloat16 as if it were integers
# (heads, kv heads, head size): grouped, equal, one for all; no powers of two; more heads than a tile holds
SHAPES = [(6, 3, 16), (4, 4, 32), (8, 1, 64), (14, 2, 24), (3, 1, 80), (72, 1, 16)]
FEW = st.lists(st.tuples(st.integers(1, 25), st.integers(0, 70)), min_size=1, max_size=5)  # (new tokens, before)
DECODES = st.lists(st.tuples(st.just(1), st.integers(0, 90)), min_size=1, max_size=5)
LONG = st.just([(90, 0), (1, 130), (1, 0)])


def batch_of(parts: list[tuple[int, int]], tables: torch.Tensor, block: int) -> PagedBatch:
    lengths = [n for n, _ in parts]
    row = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(before, before + n) for n, before in parts])
    return PagedBatch(
        row_starts=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        contexts=torch.tensor([n + before for n, before in parts], dtype=torch.int32),
        tables=tables,
        positions=positions.int(),
        slots=tables[row, positions // block].long() * block + positions % block,
    )


def scattered(parts: list[tuple[int, int]], block: int) -> tuple[int, torch.Tensor]:
    """Blocks of a sequence lie apart, and one more than is needed belongs to nobody."""
    counts = [-(-(n + before) // block) for n, before in parts]
    order = torch.randperm(sum(counts) + 1).int()
    tables = torch.zeros(len(parts), max(counts), dtype=torch.int32)
    for row, end in enumerate(np.cumsum(counts)):
        tables[row, : counts[row]] = order[end - counts[row] : end]
    return sum(counts) + 1, tables


@settings(derandomize=True, max_examples=10, deadline=None, database=None, phases=[Phase.generate])
@given(
    st.sampled_from(SHAPES),
    FEW | DECODES | LONG,
    st.sampled_from([5, 8, 16, 32]),
    st.sampled_from([torch.float32, torch.float16]),
    st.integers(0, 99),
)
def test_as_the_reference(
    heads: tuple[int, int, int], parts: list[tuple[int, int]], block: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    shape = HeadShape(*heads)
    ours, wanted = TritonKernels(dtype), ReferenceKernels(dtype)
    blocks, tables = scattered(parts, block)
    stores = [KVStore(blocks, 2, shape, block, dtype) for _ in range(2)]
    for store in stores:
        store.data.fill_(float("nan"))  # what was never written must never be read into a result
    rotary = torch.randn(200, shape.head_dim)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    whole = [(n + before, 0) for n, before in parts]
    for part in (whole, parts):  # the whole context first, then its last tokens again as chunks and decodes
        batch = batch_of(part, tables, block)
        mine = torch.randn(sum(n for n, _ in part), width).to(dtype)
        theirs = mine.clone()
        ours.rotate_and_store(mine, rotary, batch, stores[0], 1)
        wanted.rotate_and_store(theirs, rotary, batch, stores[1], 1)
        torch.testing.assert_close(mine, theirs, **close)
        if part is whole and whole != parts:
            continue  # the interpreter is slow: attention once
        result = ours.attention(mine, batch, stores[0], 1)
        torch.testing.assert_close(result, wanted.attention(theirs, batch, stores[1], 1), **close)
    torch.testing.assert_close(stores[0].data, stores[1].data, equal_nan=True, **close)
