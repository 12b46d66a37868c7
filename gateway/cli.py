"""The `sluice` command. Imports neither Django nor torch: what needs them runs as a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.local.folder import DataFolder
from gateway.local.stack import DEFAULT_EMBEDDING_MODEL, DEFAULT_MODEL, Options

__all__ = ["app", "main"]

app = typer.Typer(
    help="Sluice: a self-hosted, multi-tenant serving gateway with plug-in engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Model files in the data folder.", no_args_is_help=True)
app.add_typer(models, name="models")

DataDir = Annotated[Path, typer.Option("--data-dir", help="Where everything is kept.", envvar="SLUICE_DATA_DIR")]
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Commands that hand all their arguments, `--help` too, to another program."""
VAR = Path("var")
ManagedDir = Annotated[
    Path, typer.Option("--data-dir", help="The installation.", envvar="SLUICE_DATA_DIR", hidden=True)
]
"""Of commands that pass the rest on, their help too."""
NEEDS_NO_DATABASE = {"help", "--help", "-h", "version", "--version", "check", "makemigrations"}


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; print one line of JSON.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API.", min=1, max=65535)] = 8000,
    console_port: Annotated[int, typer.Option(help="Port of the console.", min=1, max=65535)] = 8001,
    data_dir: DataDir = VAR,
    engines: Annotated[int, typer.Option(help="Engine processes.", min=0, max=64)] = 1,
    threads: Annotated[int, typer.Option(help="Threads of each engine; 0: the cores but one, shared.", min=0)] = 0,
    backend: Annotated[str, typer.Option(help="causal_lm or simulated.")] = "causal_lm",
    model: Annotated[
        str, typer.Option(help="A known model, or the path of a GGUF file or a Hugging Face folder.")
    ] = "",
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help=f"Also serve embeddings, with {DEFAULT_EMBEDDING_MODEL}.")
    ] = False,
    embedding_model: Annotated[
        str, typer.Option(help="The same with another model: a known one, or the path of a Hugging Face folder.")
    ] = "",
    quantization: Annotated[
        str, typer.Option(help="none, or int8: weights and activations in 8 bits, faster and a little less exact.")
    ] = "none",
    engine_options: Annotated[
        str, typer.Option(help="More options of `sluice engine` for the model's engines, in one word: '--dtype fp32'.")
    ] = "",
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Start everything and watch over it until Ctrl-C."""
    if backend not in {"causal_lm", "simulated"}:
        raise typer.BadParameter("must be causal_lm or simulated", param_hint="--backend")
    if quantization not in ({"none", "int8"} if backend == "causal_lm" else {"none"}):
        raise typer.BadParameter("must be none, or int8 with causal_lm", param_hint="--quantization")
    if embeddings:
        embedding_model = embedding_model or DEFAULT_EMBEDDING_MODEL
    chosen, embedding = _model(model or DEFAULT_MODEL, "--model"), _model(embedding_model, "--embedding-model")
    served = (engines, threads, backend, chosen, embedding, quantization, _words(engine_options))
    options = Options(host, port, console_port, *served)
    folder = DataFolder(data_dir)
    if detach:
        from gateway.local.detach import detach as start_detached

        raise typer.Exit(start_detached(folder, options))
    from gateway.local.screen import PipeScreen
    from gateway.local.terminal import TerminalScreen
    from gateway.local.up import up as run_stack

    screen = PipeScreen(os.fdopen(ready_fd, "w")) if ready_fd >= 0 else TerminalScreen()
    raise typer.Exit(run_stack(folder, options, screen))


def _words(engine_options: str) -> str:
    """As they are, if they can be told apart."""
    try:
        shlex.split(engine_options)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--engine-options") from error
    return engine_options


def _model(model: str, option: str) -> str:
    """A known name, or the absolute path of what exists; nothing stays nothing."""
    if not model:
        return ""
    path = Path(model).expanduser()
    if path.exists():
        return str(path.resolve())
    if "/" in model or model.endswith(".gguf"):
        raise typer.BadParameter(f"there is no file or folder {model}", param_hint=option)
    return model


@app.command()
def down(
    data_dir: DataDir = VAR,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for running requests.", min=1)] = 60,
) -> None:
    """Stop what `up` started on this data folder."""
    from gateway.local.status import stop_supervisor

    ok, sentence = stop_supervisor(DataFolder(data_dir), timeout)
    typer.echo(sentence, err=not ok)
    raise typer.Exit(0 if ok else 1)


@app.command()
def status(
    data_dir: DataDir = VAR,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Processes, engines, queue depths and ports. Exit status 3 when nothing runs, 2 when something is wrong."""
    from gateway.local.status import collect, render

    report = collect(DataFolder(data_dir))
    typer.echo(json.dumps(report) if as_json else render(report))
    raise typer.Exit({"running": 0, "stopped": 3}.get(report["state"], 2))


@app.command(context_settings=PASS_ON)
def engine(context: typer.Context) -> None:
    """Run one engine process (arguments of `python -m engine.serve`)."""
    _become(["-m", "engine.serve", *context.args])


@app.command(context_settings=PASS_ON)
def paced(context: typer.Context) -> None:
    """Run an engine of exactly known timing, to measure what stands in front of it (`python -m engine.paced`)."""
    _become(["-m", "engine.paced", *context.args])


@models.command("pull", context_settings=PASS_ON)
def models_pull(context: typer.Context) -> None:
    """Fetch a model, check its hash, keep it in the data folder (arguments of `python -m engine.models pull`)."""
    _become(["-m", "engine.models", "pull", *context.args])


@models.command("list", context_settings=PASS_ON)
def models_list(context: typer.Context) -> None:
    """Known and fetched models (arguments of `python -m engine.models list`)."""
    _become(["-m", "engine.models", "list", *context.args])


@app.command(context_settings=PASS_ON)
def sim(context: typer.Context) -> None:
    """Simulate a workload in virtual time (arguments of `python -m engine.sim`)."""
    _become(["-m", "engine.sim", *context.args])


@app.command(context_settings=PASS_ON)
def replay(context: typer.Context) -> None:
    """Replay a recording through the scheduler, or another policy (arguments of `python -m engine.sim.replay`)."""
    _become(["-m", "engine.sim.replay", *context.args])


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Load a server and print what its users would have felt (arguments of `python -m gateway.bench`)."""
    _become(["-m", "gateway.bench", *context.args])


@app.command(context_settings=PASS_ON)
def manage(context: typer.Context, data_dir: ManagedDir = VAR) -> None:
    """Django's commands (`sluice manage shell`) on the installation in --data-dir."""
    folder = DataFolder(data_dir)
    asks_only = not context.args or not NEEDS_NO_DATABASE.isdisjoint(context.args)
    if not asks_only and not folder.locked() and "DATABASE_URL" not in os.environ:
        typer.echo(f"nothing runs on {folder.path}: without `sluice up` there is no database to ask.", err=True)
        raise typer.Exit(1)
    _become(["-m", "django", *context.args], data_dir)


def _become(arguments: list[str], data_dir: Path | None = None) -> None:
    """Go on as another Python program, with the data folder's addresses and secrets where the environment has none."""
    folder = DataFolder(data_dir or Path(os.environ.get("SLUICE_DATA_DIR", VAR)))
    kept: dict[str, Any] = folder.read(folder.environment)
    environment = {"DJANGO_SETTINGS_MODULE": "gateway.settings", **kept} | os.environ
    environment["SLUICE_DATA_DIR"] = str(folder.path)  # an option counts for more than the environment
    os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
