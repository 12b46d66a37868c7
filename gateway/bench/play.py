"""Running a command of `sluice bench` on an event loop: Ctrl-C stops and shows, and what can't be measured is said."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console

from gateway.bench.client import Unreachable
from gateway.bench.workload import DatasetMissing

__all__ = ["console", "play", "told"]

console = Console()
STOPS = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")


@contextmanager
def told() -> Iterator[None]:
    """What can't be measured is said, and the command ends with status 2."""
    try:
        yield
    except (Unreachable, DatasetMissing) as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error


def play(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run it on the fastest loop there is. The first Ctrl-C (or SIGTERM) asks it to stop and show; the second ends it.

    Servers that it started are stopped in both cases.
    """

    async def guarded() -> T:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def asked() -> None:
            for number in STOPS:
                loop.remove_signal_handler(number)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            console.print("[yellow]stopping: what was measured so far follows[/]")
            stop.set()

        for number in STOPS:
            loop.add_signal_handler(number, asked)
        return await main(stop)

    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with told(), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(guarded())
