"""`python -m engine.models pull|list`: fetch models into the data folder."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.models.checkpoint import ModelError
from engine.models.store import CATALOGUE, StoredModel, installed, pull


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "pull":
            _pull(options.name, options.data_dir, as_json=options.json)
        else:
            _list(options.data_dir, as_json=options.json)
    except ModelError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.models", description="Models in the data folder.")
    commands = parser.add_subparsers(dest="command", required=True)
    pull_command = commands.add_parser("pull", help="fetch a model by name, unless it is there and whole")
    pull_command.add_argument("name", help=", ".join(CATALOGUE))
    list_command = commands.add_parser("list", help="models that are there, and those that can be pulled")
    for command in (pull_command, list_command):
        command.add_argument("--data-dir", type=Path, default=Path("var"), help="default: var")
        command.add_argument(
            "--json",
            action="store_true",
            help="one line of JSON instead of a table or bar; progress as lines of JSON on standard error",
        )
    return parser


def _pull(name: str, data_dir: Path, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_facts(pull(name, data_dir, _say_progress))) + "\n")
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{name}: looking", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total if done else None)

        model = pull(name, data_dir, show)
    console.print(f"{model.name} is in {model.path}", soft_wrap=True, highlight=False)


def _say_progress(what: str, done: int, total: int) -> None:
    """For whoever draws the bar: one line of JSON on standard error."""
    sys.stderr.write(json.dumps({"what": what, "done": done, "total": total}) + "\n")
    sys.stderr.flush()


def _list(data_dir: Path, *, as_json: bool) -> None:
    models = installed(data_dir)
    if as_json:
        sys.stdout.write(json.dumps([_facts(model) for model in models]) + "\n")
        return
    table = Table("model", "size", "path")
    for model in models:
        table.add_row(model.name, f"{model.size_bytes / 1e6:.0f} MB", str(model.path))
    for name in sorted(CATALOGUE.keys() - {model.name for model in models}):
        table.add_row(name, f"{CATALOGUE[name].size_bytes / 1e6:.0f} MB", "not pulled")
    Console().print(table)


def _facts(model: StoredModel) -> dict[str, object]:
    return {"name": model.name, "path": str(model.path), "size_bytes": model.size_bytes}


if __name__ == "__main__":
    sys.exit(main())
