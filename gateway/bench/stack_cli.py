"""The commands of `sluice bench` that start servers themselves: `peers`, `compare`, `rows` and `kl`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from gateway.bench import compare as contest
from gateway.bench import run_rows
from gateway.bench.client import Ask
from gateway.bench.journal import Journal
from gateway.bench.kl import make_text, measure
from gateway.bench.peers import PEERS, Peers, install
from gateway.bench.play import console, play, told
from gateway.bench.rows import ROWS
from gateway.bench.stacks import CONTENDERS, Place, prepare
from gateway.bench.workload import Prompt, load, salted

__all__ = ["compare", "kl", "peers", "rows"]

Into = Annotated[Path, typer.Option("--peers", help="Folder of the peers' environments.")]
Work = Annotated[Path, typer.Option(help="Data folders, logs, converted models and finished runs.")]
Gguf = Annotated[Path, typer.Option("--model", help="The GGUF file that all of them serve.", exists=True)]
Port = Annotated[int, typer.Option(help="A free port; the next one is used too.")]
Threads = Annotated[int, typer.Option(min=0, help="Compute threads of every server; 0: the cores.")]
Seed = Annotated[int, typer.Option(help="Same seed: same prompts and arrivals.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write everything measured here.")]
LEVELS_HELP = (
    "What each visit of a server measures, one after the other: USERSxREQUESTS,USERSxREQUESTS, where so many users, "
    "each of whom sends when their last reply ended, send so many requests in all. "
    "1x4,16x32: first one user with 4 requests, then 16 with 32 between them."
)
VAR, MODEL = Path("var"), Path("var/models/smollm2-135m.gguf")


def peers(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PEERS)}; all if none is named.")] = None,
    into: Into = VAR / "peers",
) -> None:
    """Install the servers to compare with, each in an environment of its own. What is there already is kept."""
    chosen = names or list(PEERS)
    if unknown := set(chosen) - PEERS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: use {', '.join(PEERS)}")

    into.mkdir(parents=True, exist_ok=True)

    async def go(stop: asyncio.Event) -> None:
        for name in chosen:
            with console.status(name) as status:

                def say(text: str, name: str = name, status: Any = status) -> None:
                    status.update(f"{name}: {text[:100]}")
                    if text.startswith(("making", "installing", "removing", "ready")):
                        console.print(f"{name}: {text}", highlight=False)

                work = asyncio.create_task(install(PEERS[name], into.absolute(), say))
                halt = asyncio.create_task(stop.wait())
                await asyncio.wait({work, halt}, return_when=asyncio.FIRST_COMPLETED)
                halt.cancel()
                if not work.done():
                    work.cancel()
                    await asyncio.wait({work})
                    return
                await work

    play(go)


def compare(
    contender: Annotated[
        list[str] | None,
        typer.Option("--with", help=f"Repeat, in order: {'; '.join(f'{k}: {v}' for k, v in CONTENDERS.items())}."),
    ] = None,
    rounds: Annotated[int, typer.Option("--pairs", min=1, help="Rounds of all contenders, in turning order.")] = 5,
    levels: Annotated[str, typer.Option(help=LEVELS_HELP)] = "1x6,16x48,48x96",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens a request, with ignore_eos.")] = 64,
    dataset: Annotated[
        str, typer.Option(help="sharegpt (its package has to be installed) or sharegpt-like.")
    ] = "sharegpt",
    model: Gguf = MODEL,
    threads: Threads = 0,
    warmup: Annotated[int, typer.Option(min=1, help="Requests before each stack's first run, all at once.")] = 8,
    port: Port = 8600,
    work: Work = VAR / "bench",
    into: Into = VAR / "peers",
    seed: Seed = 0,
    json: JsonFile = None,
) -> None:
    """Compare servers on the same model and prompts: fresh stacks in turn, medians of the rounds' ratios.

    Each finished run is kept in WORK/compare.jsonl at once: after Ctrl-C the same command goes on from there, and with
    more --pairs or another --with it adds to what is there. Delete the file to begin anew.
    """
    chosen = tuple(contender or ("sluice-bf16", "sluice-int8", "vllm", "llama"))
    if unknown := set(chosen) - CONTENDERS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: use {', '.join(CONTENDERS)}")
    found = _levels(levels)
    place = _place(work, model, port, threads, into, slots=max(level.users for level in found))
    size = max(warmup, *(level.requests for level in found))
    texts = _texts(dataset, size, seed)
    plan = contest.Plan(
        chosen, found, rounds, Ask(max_tokens), lambda label, n: salted(texts[:n], f"Case {seed}-{label}."), warmup
    )
    settings = {
        "model": model.name, "levels": levels, "max_tokens": max_tokens, "dataset": dataset, "threads": place.threads,
        "warmup": warmup, "seed": seed, "cores": os.cpu_count(),
    }  # fmt: skip
    journal = Journal(place.work / "compare.jsonl", settings)
    play(lambda stop: contest.run_rounds(plan, place, journal, console, stop))
    result = contest.summary(plan, journal)
    _show(contest.markdown(result), result, place.work / "compare.md", json)


def kl(
    text: Annotated[
        list[Path] | None, typer.Option(exists=True, help="Text files, equal parts of each; docs/*.md if none.")
    ] = None,
    model: Gguf = MODEL,
    threads: Threads = 0,
    work: Work = VAR / "bench",
    into: Into = VAR / "peers",
    json: JsonFile = None,
) -> None:
    """What llama.cpp loses on the quantised file: KL divergence from the same weights in float32, by its own tool.

    The text is kept in WORK/kl.txt, so that other engines can be measured on the same.
    """
    files = text or sorted(Path("docs").glob("*.md"))
    if not files:
        raise typer.BadParameter("there is no docs/ here: name a text", param_hint="--text")
    place = _place(work, model, 0, threads, into)
    make_text(files, place.work / "kl.txt")

    async def go(stop: asyncio.Event) -> dict[str, Any]:
        with console.status("llama-perplexity: float32, then the file as it is"):
            return await measure(place, place.work / "kl.txt", stop)

    found = play(go)
    table = "| | mean | p99 | largest |\n|---|---|---|---|\n"
    table += f"| llama.cpp, {model.name} | {found['mean']:.4f} | {found['p99']:.4f} | {found['max']:.4f} |"
    _show(table, found | {"texts": [str(f) for f in files]}, place.work / "kl.md", json)


MAX_BYTES = 3584
"""Of a prompt, so that no tokenizer makes more of it than every contender's context holds."""


def rows(
    names: Annotated[list[str] | None, typer.Argument(help="Of those below; all if none is named.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of fresh stacks, in turning order.")] = 5,
    quantization: Annotated[str, typer.Option(help="none or int8.")] = "none",
    engine_options: Annotated[str, typer.Option(help="More options of the engine on every stack.")] = "",
    model: Gguf = MODEL,
    threads: Threads = 0,
    port: Port = 8600,
    work: Work = VAR / "bench",
    seed: Seed = 0,
    backend: Annotated[str, typer.Option(help="simulated: to try the commands without a model.")] = "causal_lm",
    scale: Annotated[float, typer.Option(min=0.01, max=1.0, help="Part of the work, to see that it runs.")] = 1.0,
    json: JsonFile = None,
) -> None:
    """Measure what single techniques are worth: the real engine with and without each, through the gateway.

    Finished runs are kept in WORK/rows.jsonl: after Ctrl-C the same command goes on from there.
    """
    chosen = names or list(ROWS)
    if unknown := set(chosen) - ROWS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: use {', '.join(ROWS)}")
    place = _place(work, model, port, threads, VAR / "peers")
    settings = {
        "model": model.name, "threads": place.threads, "quantization": quantization, "engine": engine_options,
        "backend": backend,
        "seed": seed, "scale": scale, "cores": os.cpu_count(),
    }  # fmt: skip
    journal = Journal(place.work / "rows.jsonl", settings)
    more = (f"--backend={backend}", f"--quantization={quantization}", f"--engine-options={engine_options}")

    async def go(stop: asyncio.Event) -> None:
        await prepare(place, stop)
        for name in chosen:
            if not stop.is_set():
                console.print(f"[bold]{name}[/]: {ROWS[name].about}", highlight=False)
                await run_rows.run_row(name, ROWS[name], place, journal, console, stop, pairs, more)

    play(go)
    result = [run_rows.judged(name, ROWS[name], journal, pairs) for name in chosen]
    tables = [run_rows.markdown(ROWS[r["row"]], r) for r in result if r["pairs"]]
    said = f"{place.threads} threads, {quantization}, {model.name}"
    _show("\n\n".join([said, *tables]), {"settings": settings, "rows": result}, place.work / "rows.md", json)


rows.__doc__ = (
    (rows.__doc__ or "")
    + "\n\n    "
    + "\n\n    ".join(f"{name} (about {row.minutes:g} min for 5 pairs): {row.about}" for name, row in ROWS.items())
)


def _levels(text: str) -> tuple[contest.Level, ...]:
    try:
        pairs = [part.split("x") for part in text.split(",")]
        found = tuple(contest.Level(int(users), int(requests)) for users, requests in pairs)
    except ValueError as error:
        raise typer.BadParameter(f"not USERSxREQUESTS: {error}", param_hint="--levels") from error
    if not all(level.users > 0 and level.requests > 0 for level in found):
        raise typer.BadParameter("users and requests must be above zero", param_hint="--levels")
    return found


def _texts(dataset: str, count: int, seed: int) -> list[Prompt]:
    """So many prompts that fit every contender, of twice as many."""
    with told():
        found = [p for p in load(dataset, 2 * count, seed) if len(p.text.encode()) <= MAX_BYTES]
    if len(found) < count:
        raise typer.BadParameter(f"has {len(found)} prompts of at most {MAX_BYTES} bytes; {count} are wanted",
                                 param_hint="--dataset")  # fmt: skip
    return found[:count]


def _place(work: Path, model: Path, port: int, threads: int, into: Path, slots: int = 48) -> Place:
    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    return Place(work, model.absolute(), port, threads or cores, Peers(into.absolute()), slots)


def _show(text: str, result: Any, file: Path, json: Path | None) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    file.write_text(text + "\n")
    if json:
        json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    console.print(f"written: {file}" + (f", {json}" if json else ""), highlight=False, style="dim")
