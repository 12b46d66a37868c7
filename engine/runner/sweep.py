"""`python -m engine.runner.sweep`: what a step costs by number of threads and by how long a waiting thread spins.

Each setting is a process of its own (OpenMP reads `GOMP_SPINCOUNT` once), in turn for some rounds; the table shows
medians. With `--neighbour` a process beside it keeps one core busy, as a gateway under load does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

Setting = tuple[int, int]
"""Threads, and turns of the waiting loop before a thread sleeps."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    settings = [(threads, spin) for threads in options.threads for spin in (options.spins if threads > 1 else [0])]
    found: dict[str, dict[Setting, list[float]]] = {}
    with _neighbour() if options.neighbour else contextlib.nullcontext():
        for _ in range(options.rounds):
            for setting in settings:
                for what, value in _measured(setting, options):
                    found.setdefault(what, {}).setdefault(setting, []).append(value)
    medians = {what: {one: statistics.median(values[one]) for one in settings} for what, values in found.items()}
    if options.json:
        rows = [
            {"what": what, "threads": threads, "spin": spin, "value": value}
            for what, by_setting in medians.items()
            for (threads, spin), value in by_setting.items()
        ]
        sys.stdout.write(json.dumps({"neighbour": options.neighbour, "rounds": options.rounds, "rows": rows}) + "\n")
    else:
        _show(medians, settings)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.runner.sweep", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--spins", type=int, nargs="+", default=[0, 1000, 10_000, 100_000], help="GOMP_SPINCOUNT")
    parser.add_argument("--kernels", default="cpu", help="cpu or cpu/int8 (default: %(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbour", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--json", action="store_true")
    return parser


def _measured(setting: Setting, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    threads, spin = setting
    command = [sys.executable, "-m", "engine.runner.bench", "--json", "--model", str(options.model)]
    command += ["--threads", str(threads), "--kernels", options.kernels, "--dtype", options.dtype]
    command += ["--rows", *map(str, options.rows), "--prompts", *map(str, options.prompts)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(spin)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    for row in json.loads(done.stdout)["rows"]:
        yield row["what"], row[options.kernels]


@contextlib.contextmanager
def _neighbour() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            yield
        finally:
            busy.kill()


def _show(medians: dict[str, dict[Setting, float]], settings: list[Setting]) -> None:
    table = Table("step", *(f"{threads} threads, spin {spin}" for threads, spin in settings))
    for what, by_setting in medians.items():
        table.add_row(what, *(f"{by_setting[one]:.1f}" for one in settings))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
