"""`python -m engine.runner.bench`: what a step costs, by rows and by prompt length, for each kernel set in turn."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.backends.causal_lm import CausalLM
from engine.backends.contract import SequenceInput
from engine.protocol.messages import Sampling
from engine.scheduler.step import Drop, Slice, Start, StepPlan

Row = dict[str, object]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    backends = {
        name: CausalLM.load(
            options.model,
            threads=options.threads,
            dtype=options.dtype,
            kernels=name.partition("/")[0],
            quantization=name.partition("/")[2] or "none",
            max_rows=256,
        )
        for name in options.kernels
    }
    rows = [
        {"what": what, **{name: round(value, 2) for name, value in values.items()}}
        for what, values in _measure(backends, options)
    ]
    if options.json:
        facts = {"dtype": next(iter(backends.values())).dtype, "threads": options.threads, "context": options.context}
        sys.stdout.write(json.dumps(facts | {"rows": rows}) + "\n")
    else:
        _show(rows, list(backends))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.runner.bench", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--kernels", nargs="+", default=["reference", "cpu"], help="reference, cpu, cpu/int8, …")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 1024], help="lengths, tokens")
    parser.add_argument("--context", type=int, default=300, help="tokens before the first decode step")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the process's CPU seconds instead of the clock's: for busy machines, with one thread",
    )
    parser.add_argument("--json", action="store_true")
    return parser


def _measure(backends: dict[str, CausalLM], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Alternating between the kernel sets, so that a busy machine is unfair to none."""
    for count in options.rows:
        yield f"decode, {count} rows, ms", {n: _decode(b, count, options) * 1e3 for n, b in backends.items()}
    for length in options.prompts:
        repeats = max(1, 512 // length)
        yield (
            f"prefill, {repeats} x {length}, tokens/s",
            {
                name: repeats * length / _prefill(backend, repeats, length, options.cpu_time)
                for name, backend in backends.items()
            },
        )


def _decode(backend: CausalLM, rows: int, options: argparse.Namespace) -> float:
    """Median seconds of a step in which every row decodes one token."""
    starts = _add(backend, rows, options.context, options.context + options.steps + 1)
    for one in range(rows):  # prompts in steps of their own: only the decode steps count
        backend.execute(StepPlan(0, (Slice(one, 0, options.context, True),), starts=(starts[one],)))
    seconds = []
    for step in range(options.steps):
        slices = tuple(Slice(one, options.context + step, 1, True) for one in range(rows))
        seconds.append(_seconds(backend, StepPlan(1 + step, slices), options.cpu_time))
    _drop(backend, rows)
    return statistics.median(seconds)


def _prefill(backend: CausalLM, rows: int, length: int, cpu_time: bool) -> float:
    """Median seconds of a step that computes whole prompts."""
    seconds = []
    for _ in range(3):
        starts = _add(backend, rows, length, length)
        slices = tuple(Slice(one, 0, length, True) for one in range(rows))
        seconds.append(_seconds(backend, StepPlan(0, slices, starts=starts), cpu_time))
        _drop(backend, rows)
    return statistics.median(seconds)


def _seconds(backend: CausalLM, plan: StepPlan, cpu_time: bool) -> float:
    began = time.process_time()
    clock = backend.execute(plan).seconds
    return time.process_time() - began if cpu_time else clock


def _add(backend: CausalLM, rows: int, length: int, room: int) -> tuple[Start, ...]:
    blocks = -(-room // backend.capacity.block_size)
    how = Sampling(max_tokens=room, temperature=0.0)
    for one in range(rows):
        prompt = tuple(1000 + (one * 7919 + n * 104729) % 40000 for n in range(length))
        backend.add(SequenceInput(one, prompt, length, how, 0, 0))
    return tuple(Start(one, tuple(range(one * blocks, (one + 1) * blocks)), 0) for one in range(rows))


def _drop(backend: CausalLM, rows: int) -> None:
    backend.execute(StepPlan(0, drops=tuple(Drop(one) for one in range(rows))))


def _show(rows: list[Row], names: list[str]) -> None:
    table = Table("step", *names)
    for row in rows:
        table.add_row(str(row["what"]), *(str(row[name]) for name in names))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
