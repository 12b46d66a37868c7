"""`python -m engine.products.bench`: what all matrix products of one step cost, for each kind of weights."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.products.blocks import BLOCK, BLOCK_BYTES, Blocks
from engine.products.packed import Products

Layer = Callable[[Tensor], Tensor]
_KINDS = ("torch fp32", "fp32", "bf16", "13 bits", "8 bits", "4 bits")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    products = Products()
    found: dict[int, dict[str, float]] = {rows: {} for rows in options.rows}
    for kind in options.kinds:
        for (outputs, inputs), count in _layers(options).items():
            copies = [_layer(products, kind, outputs, inputs) for _ in range(min(count, options.copies))]
            for rows in options.rows:
                seconds = _fastest(copies, torch.randn(rows, inputs).to(_dtype(kind)), options)
                found[rows][kind] = found[rows].get(kind, 0.0) + seconds * count * 1e3
    if options.json:
        sys.stdout.write(json.dumps({"threads": options.threads, "variant": products.variant, "ms": found}) + "\n")
    else:
        _show(found, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.products.bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--kinds", nargs="+", default=list(_KINDS), choices=_KINDS)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--feed-forward", type=int, default=1536)
    parser.add_argument("--qkv", type=int, default=960, help="outputs of queries, keys and values together")
    parser.add_argument("--copies", type=int, default=8, help="layers really kept, so that caches don't hold them all")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts: neighbours only slow down")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: for busy machines, one thread")
    parser.add_argument("--json", action="store_true")
    return parser


def _layers(options: argparse.Namespace) -> dict[tuple[int, int], int]:
    """(outputs, inputs) and how many a step has; without the output layer, which only sampled rows go through."""
    hidden, wide, layers = options.hidden, options.feed_forward, options.layers
    return {(options.qkv, hidden): layers, (hidden, hidden): layers, (2 * wide, hidden): layers, (hidden, wide): layers}


def _dtype(kind: str) -> torch.dtype:
    return torch.float32 if kind.endswith("fp32") else torch.bfloat16


def _layer(products: Products, kind: str, outputs: int, inputs: int) -> Layer:
    if kind == "13 bits":
        return products.wide(torch.randn(outputs, inputs))
    if kind == "8 bits":
        return products.levels(Blocks.rounded(torch.randn(outputs, inputs)))
    if kind == "4 bits":
        size = (outputs, inputs // BLOCK, BLOCK_BYTES[4])
        blocks = torch.randint(256, size, dtype=torch.uint8)
        blocks[..., :4] = torch.randn(*size[:2], 2).half().view(torch.uint8)
        return products.levels(Blocks(4, blocks.flatten(1)))
    weight = torch.randn(outputs, inputs).to(_dtype(kind))
    return products.floats(weight) if kind != "torch fp32" else lambda x: torch.nn.functional.linear(x, weight)


def _fastest(layers: list[Layer], x: Tensor, options: argparse.Namespace) -> float:
    """Seconds of one product, all copies in turn."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    best = float("inf")
    with torch.inference_mode():
        for _ in range(options.repeats + 1):
            began = clock()
            for layer in layers:
                layer(x)
            best = min(best, (clock() - began) / len(layers))
    return best


def _show(found: dict[int, dict[str, float]], options: argparse.Namespace) -> None:
    table = Table("rows", *options.kinds, title=f"ms, {options.threads} threads")
    for rows, by_kind in found.items():
        table.add_row(str(rows), *(f"{by_kind[kind]:.1f}" for kind in options.kinds))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
