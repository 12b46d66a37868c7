"""Command line: `python -m engine.sim run …` plays a workload, `python -m engine.sim table NAME` an experiment."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from engine.scheduler import POLICIES, SchedulerConfig
from engine.sim.experiments import EXPERIMENTS
from engine.sim.report import plot, summary, table
from engine.sim.workload import ARRIVALS, LENGTHS, TIERS, Source, read_trace, stream
from engine.sim.world import COSTS, World

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice sim", description="The scheduler and the fair queue in virtual time.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="play a workload and report latency, attainment and fairness")
    run.add_argument("--policy", default="tiered", choices=sorted(POLICIES))
    run.add_argument("--engines", type=int, default=1)
    run.add_argument("--requests", type=int, default=1000, help="in all, over all tenants")
    run.add_argument("--rate", type=float, default=2.0, help="requests per second, over all tenants")
    run.add_argument("--tenants", type=int, default=3, help="tenant i is of tier i mod 3")
    run.add_argument("--arrivals", default="poisson", choices=sorted(ARRIVALS))
    run.add_argument("--lengths", default="sharegpt", help=f"{', '.join(sorted(LENGTHS))}, or PROMPT/OUTPUT")
    run.add_argument("--trace", type=Path, help="CSV: at_s,prompt,output[,tier,tenant,weight,prefix,shared]")
    run.add_argument("--cost", default="cpu", choices=sorted(COSTS))
    run.add_argument("--rows", type=int, default=32)
    run.add_argument("--blocks", type=int, default=4096)
    run.add_argument("--host-blocks", type=int, default=0)
    run.add_argument("--step-tokens", type=int, default=512)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--json", action="store_true")
    run.add_argument("--plot", type=Path, help="write the TTFT distribution by tier as SVG")
    tables = commands.add_parser("table", help="play one of the experiments of docs/scheduling.md")
    tables.add_argument("name", choices=sorted(EXPERIMENTS))
    tables.add_argument("--json", action="store_true")
    tables.add_argument("--plot", type=Path, help="write the rows as SVG (first column against the others)")
    return parser


def _run(options: argparse.Namespace) -> int:
    each = max(1, options.requests // options.tenants)
    rate = options.rate / options.tenants
    sources = [
        Source(f"t{i}", i % 3, rate, each, options.arrivals, options.lengths) for i in range(max(1, options.tenants))
    ]
    arrivals = list(read_trace(options.trace)) if options.trace else stream(sources, options.seed)
    config = SchedulerConfig(
        device_blocks=options.blocks,
        host_blocks=options.host_blocks,
        max_rows=options.rows,
        max_step_tokens=options.step_tokens,
    )
    world = World(config, options.policy, options.engines, truth=COSTS[options.cost])
    total = len(arrivals) if isinstance(arrivals, list) else each * len(sources)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        requests = bar.add_task("requests", total=total)
        world.run(arrivals, progress=lambda done: bar.update(requests, completed=done))
    result = summary(world)
    if options.plot:
        waits: dict[str, list[tuple[float, float]]] = {}
        for tier in TIERS:
            ttft = sorted(v.ttft_s for v in world.lives.values() if v.arrival.tier == tier.rank and v.first_s >= 0)
            if ttft:
                waits[tier.name] = [(v, (i + 1) / len(ttft)) for i, v in enumerate(ttft)]
        options.plot.write_text(plot("Time to first token", waits, "seconds", "part"), encoding="utf-8")
    if options.json:
        print(json.dumps(result, indent=1))  # noqa: T201
    else:
        print(table([{k: v for k, v in result.items() if k != "rows"}]), table(result["rows"]), sep="\n\n")  # noqa: T201
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "run":
            return _run(options)
    except (OSError, ValueError) as error:
        print(f"sluice sim: {error}", file=sys.stderr)  # noqa: T201
        return 2
    rows = EXPERIMENTS[options.name]()
    if options.plot:
        first, *others = rows[0]
        lines = {name: [(float(row[first]), float(row[name])) for row in rows] for name in others}
        options.plot.write_text(plot(options.name, lines, first, ""), encoding="utf-8")
    print(json.dumps(rows, indent=1) if options.json else table(rows))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
