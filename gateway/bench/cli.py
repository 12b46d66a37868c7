"""`sluice bench`: load any OpenAI-compatible server and print what its users would have felt."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import orjson
import typer

from gateway.bench import stack_cli
from gateway.bench.ab import ratios, ratios_table, run_pairs
from gateway.bench.client import Ask, Target, Unreachable, find_model
from gateway.bench.drive import run_closed, run_open
from gateway.bench.fronts import FRONTS, INSTALL, started
from gateway.bench.lean import Front
from gateway.bench.metrics import Report, Slo
from gateway.bench.overhead import Found, Plan, compare
from gateway.bench.overhead_show import as_markdown, show, to_dict
from gateway.bench.play import console, play
from gateway.bench.show import plot, progress, runs_table, tenants_table
from gateway.bench.workload import DATASETS, WORDS, Prompt, load, salted, share_prefix

__all__ = ["app"]

app = typer.Typer(
    help="Load any OpenAI-compatible server and measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (stack_cli.peers, stack_cli.compare, stack_cli.rows, stack_cli.kl):
    app.command()(command)

Base = Annotated[str, typer.Option(help="Base URL, with or without /v1.")]
Keys = Annotated[
    list[str] | None, typer.Option("--key", envvar="SLUICE_BENCH_KEY", help="Key, or name=key; repeat for tenants.")
]
Model = Annotated[str, typer.Option(help="Model; the first one listed if left out.")]
Dataset = Annotated[str, typer.Option(help=f"One of {', '.join(DATASETS)}.")]
Requests = Annotated[int, typer.Option(min=0, help="Requests a run; 0: six per user, at least 32.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Output tokens a request.")]
Follow = Annotated[
    bool, typer.Option("--follow-dataset", help="Reply lengths of the data set, capped by --max-tokens.")
]
IgnoreEos = Annotated[bool, typer.Option(help="Ask for the full length (an extension of most servers).")]
Completions = Annotated[bool, typer.Option("--completions", help="Use /v1/completions: no chat template.")]
Prefix = Annotated[str, typer.Option(help="GROUPSxWORDS: common beginnings, e.g. 4x384.")]
Warmup = Annotated[int, typer.Option(min=0, help="Requests before the first run, of other prompts, not counted.")]
Burstiness = Annotated[float, typer.Option(help="Gamma shape: 1 Poisson, below 1 burstier (CV = 1/sqrt).")]
Seed = Annotated[int, typer.Option(help="Same seed: same lengths, texts and arrivals.")]
Objectives = Annotated[str, typer.Option("--slo", help="For goodput: ttft=500ms,tpot=50ms,stall=1s,total=20s.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a request is abandoned.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write everything measured to this file.")
]


@dataclass(frozen=True, slots=True)
class Load:
    """The options that say what is offered, common to every subcommand."""

    dataset: str
    requests: int
    ask: Ask
    prefix: str = ""
    burstiness: float = 1.0
    seed: int = 0
    salt: str = ""
    """Differs from call to call, so that a server kept running doesn't answer from its prefix cache."""

    def prompts(self, users: float, run: str, *, count: int = 0) -> list[Prompt]:
        """The prompts of one run. Runs share lengths and texts but not their first words."""
        count = count or self.requests or max(32, 6 * (0 if math.isinf(users) else round(users)))
        found = load(self.dataset, count, self.seed)
        if self.prefix:
            groups, words = (int(n) for n in self.prefix.split("x"))
            found = share_prefix(found, groups, words, self.seed)
        return salted(found, " ".join(random.Random(f"{self.salt}/{run}").choices(WORDS, k=4)).capitalize() + ".")

    async def run(self, target: Target, prompts: Sequence[Prompt], level: Level, stop: asyncio.Event) -> Report:
        users, rate = level
        label = f"{users} at a time" if users else f"{rate:g}/s"
        with progress(console, label, len(prompts)) as on_trace:
            common: dict[str, Any] = {"ask": self.ask, "stop": stop, "on_trace": on_trace}
            if users:
                return await run_closed(target, prompts, concurrency=users, **common)
            arrivals: dict[str, Any] = {"rate": rate, "burstiness": self.burstiness, "seed": self.seed}
            return await run_open(target, prompts, **arrivals, **common)


Level = tuple[int, float]
"""(concurrency, 0) for a closed loop or (0, requests a second) for an open one."""


@app.command()
def serve(
    base: Base,
    key: Keys = None,
    model: Model = "",
    concurrency: Annotated[str, typer.Option(help="Closed loop: users at a time, e.g. 1,4,16.")] = "",
    rate: Annotated[str, typer.Option(help="Open loop: requests a second, e.g. 2,8,inf.")] = "",
    burstiness: Burstiness = 1.0,
    dataset: Dataset = "sharegpt-like",
    requests: Requests = 0,
    max_tokens: MaxTokens = 64,
    follow_dataset: Follow = False,
    ignore_eos: IgnoreEos = True,
    completions: Completions = False,
    prefix: Prefix = "",
    warmup: Warmup = 4,
    seed: Seed = 0,
    slo: Objectives = "",
    timeout: Timeout = 600.0,
    json: JsonFile = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Picture; needs matplotlib.")] = None,
) -> None:
    """Drive one server through one or more levels of load. Ctrl-C prints what was measured so far."""
    ask = Ask(max_tokens, ignore_eos, follow_dataset, chat=not completions, timeout_s=timeout)
    work = Load(dataset, requests, ask, _prefix(prefix), burstiness, seed, secrets.token_hex(4))
    objectives, levels = _slo(slo), _levels(concurrency, rate)
    target = Target(base, _keys(key), model)

    async def go(stop: asyncio.Event) -> tuple[Target, list[Report]]:
        ready = await _ready(target)
        await _warm(ready, work, warmup, stop)
        reports: list[Report] = []
        for level in levels:
            if stop.is_set():
                break
            prompts = work.prompts(level[0] or level[1], f"serve/{level}")
            reports.append(await work.run(ready, prompts, level, stop))
        return ready, reports

    ready, reports = play(go)
    _something(reports)
    console.print(f"[bold]{ready.model}[/] at {base}, {dataset}, at most {max_tokens} tokens out", highlight=False)
    console.print(runs_table(reports, objectives))
    for report in reports:
        if len(report.tenants()) > 1:
            console.print(tenants_table(report, objectives))
        _print_errors(report, objectives)
    _write(json, "serve", ready, work, {"runs": [r.to_dict(objectives) for r in reports]})
    if plot_file:
        _plot(reports, plot_file)
    raise typer.Exit(0 if any(t.ending == "ok" for r in reports for t in r.traces) else 1)


@app.command()
def ab(
    base: Annotated[list[str], typer.Option(help="Twice: URL or name=URL of A, then of B.")],
    key: Annotated[list[str] | None, typer.Option(help="One key for both, or A's and then B's.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="One model for both, or A's and then B's.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: users at a time.")] = 16,
    rate: Annotated[float, typer.Option(help="Open loop instead: requests a second.")] = 0.0,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs, in turn.")] = 5,
    burstiness: Burstiness = 1.0,
    dataset: Dataset = "sharegpt-like",
    requests: Requests = 0,
    max_tokens: MaxTokens = 64,
    follow_dataset: Follow = False,
    ignore_eos: IgnoreEos = True,
    completions: Completions = False,
    prefix: Prefix = "",
    warmup: Warmup = 4,
    seed: Seed = 0,
    slo: Objectives = "",
    timeout: Timeout = 600.0,
    json: JsonFile = None,
) -> None:
    """Compare two servers: alternating pairs of runs, the median of the paired ratios."""
    if len(base) != 2 or any(len(x or ()) > 2 for x in (key, model)):
        raise typer.BadParameter("give --base exactly twice, --key and --model at most twice")
    ask = Ask(max_tokens, ignore_eos, follow_dataset, chat=not completions, timeout_s=timeout)
    work = Load(dataset, requests, ask, _prefix(prefix), burstiness, seed, secrets.token_hex(4))
    objectives = _slo(slo)
    level: Level = (0, rate) if rate else (concurrency, 0.0)
    named = [_named(text, default) for text, default in zip(base, "AB", strict=True)]
    targets = [Target(url, _keys(_side(key, i)), "".join(_side(model, i) or ())) for i, (_, url) in enumerate(named)]

    async def go(stop: asyncio.Event) -> tuple[list[Target], list[Any]]:
        ready = [await _ready(t) for t in targets]
        for target in ready:
            await _warm(target, work, warmup, stop)

        async def run(side: str, pair: int) -> Report:
            # Both sides get the same texts with other first words: they may share an engine, and so a prefix cache.
            prompts = work.prompts(level[0] or level[1], f"{side}/{pair}")
            return await work.run(ready["ab".index(side)], prompts, level, stop)

        return ready, await run_pairs(pairs, run)

    ready, found = play(go)
    _something(found)
    rows = ratios(found, objectives)
    console.print(ratios_table(rows, (named[0][0], named[1][0])))
    reports = [r for pair in found for r in (pair.a, pair.b)]
    for report in reports:
        _print_errors(report, objectives)
    sides = [
        {"a": p.a.to_dict(objectives, requests=False), "b": p.b.to_dict(objectives, requests=False)} for p in found
    ]
    both = {"b": {"name": named[1][0], "base": ready[1].base, "model": ready[1].model}}
    _write(json, "ab", ready[0], work, both | {"pairs": sides, "ratios": [asdict(r) for r in rows]})
    raise typer.Exit(0 if rows else 1)


@app.command()
def gateway(
    base: Base,
    key: Annotated[str, typer.Option(envvar="SLUICE_BENCH_KEY", help="Key of the gateway.")] = "",
    model: Annotated[str, typer.Option(help="Model that the paced engine serves there.")] = "paced",
    pid: Annotated[list[int] | None, typer.Option(help="The gateway's process; repeat: all are summed.")] = None,
    upstream: Annotated[
        str, typer.Option(help="HOST:PORT of the paced engine's own HTTP: what peers stand before.")
    ] = "",
    peers: Annotated[str, typer.Option(help="Measured in turn with it: portkey,nginx.")] = "",
    install: Annotated[bool, typer.Option("--install", help="Install these peers first.")] = False,
    streams: Annotated[str, typer.Option(help="Streams open at a time; empty: none of this.")] = "1,32,200",
    pairs: Annotated[int, typer.Option(min=1, help="Rounds in which each is measured once.")] = 3,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of one measurement.")] = 5.0,
    idle: Annotated[int, typer.Option(min=0, help="Also the memory of so many idle streams.")] = 0,
    slow_readers: Annotated[
        int, typer.Option(min=0, help="Also readers beside so many clients that read nothing.")
    ] = 0,
    peers_dir: Annotated[Path, typer.Option(help="Where peers are installed.")] = Path("var/peers"),
    json: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table for a document.")] = None,
) -> None:
    """What a gateway adds in front of an engine of known timing (`python -m engine.paced`), beside other gateways."""
    ours = Front("sluice", base, key, model, pids=tuple(pid or ()))
    names = [name for name in peers.split(",") if name]
    if unknown := set(names) - set(FRONTS):
        raise typer.BadParameter(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(FRONTS)}")
    if names and not upstream:
        raise typer.BadParameter("--peers needs --upstream")
    levels = [users for users, _ in _levels(streams, "")] if streams else []
    plan = Plan(levels, pairs, seconds, idle, slow_readers)

    async def go(stop: asyncio.Event) -> Found:
        async with AsyncExitStack() as stack:
            if install:
                for name in names:
                    await INSTALL[name](peers_dir, console.print)
            work = Path(stack.enter_context(TemporaryDirectory(prefix="sluice-bench-")))
            fronts = [await stack.enter_async_context(started(n, peers_dir, work, upstream)) for n in names]
            direct = [Front("direct", f"http://{upstream}", model=model)] if upstream else []
            return await compare(plan, [ours, *fronts, *direct], stop, lambda what: console.print(what, style="dim"))

    found = play(go)
    _something([*found.runs, *found.idle, *found.unread])
    show(found, console)
    if json:
        json.write_bytes(orjson.dumps(to_dict(found), option=orjson.OPT_INDENT_2))
    if markdown:
        markdown.write_text(as_markdown(found))
    raise typer.Exit(1 if any(r.wrong for r in found.runs) else 0)


async def _ready(target: Target) -> Target:
    return target if target.model else replace(target, model=await find_model(target))


async def _warm(target: Target, work: Load, count: int, stop: asyncio.Event) -> None:
    """Also the first proof that the server answers at all: a run of nothing but errors would tell less."""
    if not count:
        return
    prompts = work.prompts(0, f"warm/{target.base}", count=count)
    report = await run_closed(target, prompts, concurrency=min(count, 4), ask=work.ask, stop=stop)
    summary = report.summary()
    if not summary.ok and not report.interrupted:
        said = ", ".join(summary.errors)
        raise Unreachable(f"no warm-up request to {target.url(work.ask.path())} succeeded: {said}")


def _keys(texts: list[str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(_named(text, f"key {i + 1}") for i, text in enumerate(texts or ())) or (("", ""),)


def _named(text: str, default: str) -> tuple[str, str]:
    """`name=value`, where a value alone may hold an equals sign too (URLs, keys)."""
    match = re.fullmatch(r"(?!sk-)([\w. -]+)=(.+)", text)
    return (match[1], match[2]) if match else (default, text)


def _side(values: list[str] | None, side: int) -> list[str] | None:
    return [values[min(side, len(values) - 1)]] if values else None


def _levels(concurrency: str, rate: str) -> list[Level]:
    try:
        users = [int(part) for part in filter(None, (concurrency or ("" if rate else "1,4,16")).split(","))]
        rates = [float(part) for part in filter(None, rate.split(","))]
    except ValueError as error:
        raise typer.BadParameter(f"not a list of numbers: {error}") from error
    if not all(n > 0 for n in (*users, *rates)):
        raise typer.BadParameter("concurrency and rate must be above zero")
    return [(n, 0.0) for n in users] + [(0, r) for r in rates]


def _slo(text: str) -> Slo | None:
    try:
        return Slo.parse(text) if text else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _prefix(text: str) -> str:
    if text and not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,4}", text):
        raise typer.BadParameter("write GROUPSxWORDS, for example 4x384")
    return text


def _something(found: Sequence[object]) -> None:
    if not found:
        console.print("stopped before the first run ended: nothing was measured", style="yellow")
        raise typer.Exit(1)


def _print_errors(report: Report, slo: Slo | None) -> None:
    for code, count in report.summary(slo).errors.items():
        console.print(f"{report.label}: {count} x {code}", style="red", highlight=False, markup=False)


def _write(path: Path | None, command: str, target: Target, work: Load, found: dict[str, Any]) -> None:
    """Everything needed to repeat and to judge the run; of the keys only their names."""
    if path is None:
        return
    about = {
        "command": command,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "base": target.base,
        "model": target.model,
        "tenants": [name for name, _ in target.keys],
        "load": asdict(work),
        "client_cores": os.cpu_count(),
    }
    path.write_bytes(orjson.dumps(about | found, option=orjson.OPT_INDENT_2))
    console.print(f"written: {path}", highlight=False)


def _plot(reports: Sequence[Report], path: Path) -> None:
    try:
        plot(reports, path)
        console.print(f"drawn: {path}", highlight=False)
    except ImportError:
        console.print("no picture: pip install matplotlib", style="yellow")
