"""Running a command of `sluice bench` on an event loop: Ctrl-C stops and shows, and what can't be measured is said."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer
from rich.console import Console

from gateway.bench.client import Unreachable
from gateway.bench.workload import DatasetMissing

__all__ = ["console", "play"]

console = Console()
T = TypeVar("T")


def play(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run it on the fastest loop there is. The first Ctrl-C asks it to stop and show; the second ends it at once."""

    async def guarded() -> T:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def asked() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            console.print("[yellow]stopping: what was measured so far follows[/]")
            stop.set()

        loop.add_signal_handler(signal.SIGINT, asked)
        return await main(stop)

    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(guarded())
    except (Unreachable, DatasetMissing) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(2) from error
