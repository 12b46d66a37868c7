"""What `up` says while it works: on a terminal with progress bars, in plain lines elsewhere, or as events down a pipe.

A detached supervisor writes events; the command that started it replays them on its own screen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["PipeScreen", "PlainScreen", "RichScreen", "Screen", "replay", "terminal_screen"]


class Screen(Protocol):
    """Steps begin, may progress, and are done; notes are said at any time; the end is `ready` or `error`."""

    def begin(self, step: str) -> None: ...
    def progress(self, step: str, done: float, total: float) -> None: ...
    def done(self, step: str, detail: str = "") -> None: ...
    def note(self, text: str) -> None: ...
    def error(self, text: str) -> None: ...
    def ready(self, credentials: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class PlainScreen:
    """One line per finished step, for logs and pipes."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self.out = out or sys.stderr
        self._began: dict[str, float] = {}

    def begin(self, step: str) -> None:
        self._began[step] = time.monotonic()

    def progress(self, step: str, done: float, total: float) -> None:
        pass

    def done(self, step: str, detail: str = "") -> None:
        took_s = time.monotonic() - self._began.pop(step, time.monotonic())
        self._say(f"{step}: {detail or 'ready'} ({took_s:.1f} s)")

    def note(self, text: str) -> None:
        self._say(text)

    def error(self, text: str) -> None:
        self._say(f"error: {text}")

    def ready(self, credentials: Mapping[str, Any]) -> None:
        self._say("ready")

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        try:
            print(text, file=self.out, flush=True)
        except (BrokenPipeError, OSError):
            # Nobody reads any more (a closed terminal); the supervisor's work doesn't depend on it.
            self.out = sys.__stderr__ or self.out


class RichScreen(PlainScreen):
    """A spinner and a bar per running step."""

    def __init__(self, out: IO[str] | None = None) -> None:
        super().__init__(out)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=self.out)
        columns = (SpinnerColumn(), TextColumn("{task.description:<22}"), BarColumn(24), TimeElapsedColumn())
        self._bars: Progress = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()

    def begin(self, step: str) -> None:
        super().begin(step)
        self._tasks[step] = self._bars.add_task(step, total=None)

    def progress(self, step: str, done: float, total: float) -> None:
        if step in self._tasks:
            self._bars.update(self._tasks[step], completed=done, total=total)

    def done(self, step: str, detail: str = "") -> None:
        if step in self._tasks:
            self._bars.remove_task(self._tasks.pop(step))
        super().done(step, detail)

    def ready(self, credentials: Mapping[str, Any]) -> None:
        self._bars.stop()

    def error(self, text: str) -> None:
        self._bars.stop()
        super().error(text)

    def close(self) -> None:
        self._bars.stop()

    def _say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)


def terminal_screen() -> Screen:
    """Bars when a person looks at standard error, else lines."""
    return RichScreen() if sys.stderr.isatty() else PlainScreen()


class PipeScreen:
    """Events as JSON lines to the command that waits for a detached supervisor; silent once that has gone."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe: IO[str] | None = pipe
        self._log = PlainScreen()

    def begin(self, step: str) -> None:
        self._send(event="begin", step=step)

    def progress(self, step: str, done: float, total: float) -> None:
        self._send(event="progress", step=step, done=done, total=total)

    def done(self, step: str, detail: str = "") -> None:
        self._send(event="done", step=step, detail=detail)

    def note(self, text: str) -> None:
        self._log.note(text)
        self._send(event="note", text=text)

    def error(self, text: str) -> None:
        self._log.error(text)
        self._send(event="error", text=text)
        self.close()

    def ready(self, credentials: Mapping[str, Any]) -> None:
        self._send(event="ready", credentials=credentials)
        self.close()

    def close(self) -> None:
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            try:
                pipe.close()
            except OSError:
                pass

    def _send(self, **event: Any) -> None:
        if self._pipe is None:
            return
        try:
            self._pipe.write(json.dumps(event) + "\n")
            self._pipe.flush()
        except OSError:
            self._pipe = None


def replay(events: IO[str], screen: Screen) -> dict[str, Any] | None:
    """Show a detached supervisor's events; the credentials when it becomes ready, None when it gives up."""
    for line in events:
        event: dict[str, Any] = json.loads(line)
        kind = event.pop("event")
        getattr(screen, kind)(**event)
        if kind == "ready":
            return dict(event["credentials"])
        if kind == "error":
            return None
    screen.error("the supervisor ended before it was ready; see supervisor.log in the data folder's logs.")
    return None
