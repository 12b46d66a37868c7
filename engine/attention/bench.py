"""`python -m engine.attention.bench`: what a layer's operations between its products cost, each by itself.

A case is `rows x tokens @ before`: so many sequences, each with so many new tokens after so many others.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.attention.choose import choose_kernels
from engine.attention.contract import HeadShape, Kernels, KVStore, PagedBatch

_BLOCK = 16
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    tokens: int
    before: int

    @staticmethod
    def parse(text: str) -> Case:
        """Raises ValueError for what is no case."""
        found = re.fullmatch(r"(\d+)x(\d+)@(\d+)", text)
        if found is None:
            raise ValueError(f"{text!r} is not like 16x1@220")
        return Case(*(int(number) for number in found.groups()))

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}@{self.before}"

    def multiplications(self, shape: HeadShape) -> int:
        """Of the attention: queries with the keys they see, and weights with values."""
        pairs = self.rows * sum(self.before + n + 1 for n in range(self.tokens))
        return pairs * shape.heads * shape.head_dim * 2


_CASES = (Case(16, 1, 220), Case(1, 48, 300), Case(1, 200, 0))


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape, dtype = HeadShape(options.heads, options.kv_heads, options.head_dim), _DTYPES[options.dtype]
    widths = (shape.heads * shape.head_dim, options.feed_forward)
    kernels = choose_kernels(options.kernels, dtype, shape, block_size=_BLOCK, widths=widths, threads=options.threads)
    rows = [_measure(case, kernels, shape, dtype, options) for case in options.cases]
    if options.json:
        facts: dict[str, Any] = {"kernels": kernels.name, "threads": options.threads, "dtype": options.dtype}
        sys.stdout.write(json.dumps(facts | {"layers": options.layers, "ms": rows}) + "\n")
    else:
        _show(rows, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.attention.bench", description=__doc__)
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=_CASES)
    parser.add_argument("--kernels", default="auto", choices=["auto", "cpu", "reference"])
    parser.add_argument("--dtype", default="bf16", choices=list(_DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30, help="taken in turn: no cache holds what they read")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--feed-forward", type=int, default=1536)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each operation; the fastest counts")
    parser.add_argument("--json", action="store_true")
    return parser


def _measure(
    case: Case, kernels: Kernels, shape: HeadShape, dtype: torch.dtype, options: argparse.Namespace
) -> dict[str, object]:
    """ms of each operation for all layers (two norms to a layer), and multiplications a second of the attention."""
    store, batch = _store(case, shape, dtype, options.layers), _batch(case)
    total, width = case.rows * case.tokens, shape.heads * shape.head_dim
    qkv = torch.randn(total, width + 2 * shape.kv_heads * shape.head_dim).to(dtype)
    rotary = torch.randn(case.before + case.tokens, shape.head_dim)
    residual, weight = torch.randn(total, width), torch.rand(width)
    gate_up = torch.randn(total, 2 * options.feed_forward).to(dtype)
    delta = torch.zeros(total, width, dtype=dtype)
    operations: dict[str, Callable[[int], Tensor | None]] = {
        "store": lambda layer: kernels.rotate_and_store(qkv, rotary, batch, store, layer),
        "attention": lambda layer: kernels.attention(qkv, batch, store, layer),
        "norm": lambda layer: kernels.add_rms_norm(residual, delta, weight, 1e-5),
        "silu": lambda layer: kernels.silu_mul(gate_up),
    }
    with torch.inference_mode():
        found = {name: _fastest(one, options.layers, options.seconds) for name, one in operations.items()}
    rate = case.multiplications(shape) * options.layers / found["attention"] / 1e9
    return {"case": str(case), **{n: round(s * 1e3, 2) for n, s in found.items()}, "10^9/s": round(rate, 1)}


def _store(case: Case, shape: HeadShape, dtype: torch.dtype, layers: int) -> KVStore:
    blocks = case.rows * -(-(case.before + case.tokens) // _BLOCK)
    store = KVStore(blocks, layers, shape, _BLOCK, dtype)
    store.data.normal_()
    return store


def _batch(case: Case) -> PagedBatch:
    context = case.before + case.tokens
    count = -(-context // _BLOCK)
    tables = torch.randperm(case.rows * count, generator=torch.Generator().manual_seed(1)).view(case.rows, count)
    places = torch.arange(case.before, context)
    slots = tables[:, places // _BLOCK] * _BLOCK + places % _BLOCK
    return PagedBatch(
        row_starts=torch.arange(case.rows + 1, dtype=torch.int32) * case.tokens,
        contexts=torch.full((case.rows,), context, dtype=torch.int32),
        tables=tables.int(),
        positions=places.int().repeat(case.rows),
        slots=slots.flatten(),
    )


def _fastest(operation: Callable[[int], Tensor | None], layers: int, seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        for layer in range(layers):
            operation(layer)
        best = min(best, time.perf_counter() - began)
    return best


def _show(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    table = Table(*rows[0], title=f"ms of {options.layers} layers, {options.dtype}, {options.threads} threads")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
