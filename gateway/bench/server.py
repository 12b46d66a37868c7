"""A server process of a benchmark: started fresh, waited for, stopped whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from gateway.bench.client import Unreachable

__all__ = ["finished", "running", "tail"]

POLL_S = 0.1
STOP_S = 20.0
GONE_S = 2.0


@asynccontextmanager
async def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    stop: asyncio.Event | None = None,
) -> AsyncIterator[float]:
    """The process in a group of its own until the block ends; yields the seconds until the address `ready` said 200.

    Raises Unreachable with the end of its log when it ends before, isn't ready in time, or `stop` comes first; also
    when it ended of itself inside the block.
    """
    if await _taken(ready):
        raise Unreachable(f"something else already answers at {ready}: take another --port")
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        while not await _answers(ready):
            if process.poll() is not None:
                raise Unreachable(f"{command[0]} ended with status {process.returncode}:\n{tail(log)}")
            if stop is not None and stop.is_set():
                raise Unreachable("stopped before it was ready")
            if time.monotonic() - began > timeout_s:
                raise Unreachable(f"{command[0]} wasn't ready within {timeout_s:.0f} s:\n{tail(log)}")
            await asyncio.sleep(POLL_S)
        yield time.monotonic() - began
        if not await _answers(ready):  # its connections may be gone a moment before it is
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, GONE_S)
        if process.poll() is not None:
            raise Unreachable(f"{command[0]} ended with status {process.returncode} while it was used:\n{tail(log)}")
    finally:
        await asyncio.shield(asyncio.to_thread(_end, process))


async def finished(
    command: Sequence[str], environment: Mapping[str, str] | None = None, stop: asyncio.Event | None = None
) -> str:
    """Run a command to its end, unmoved by Ctrl-C; its standard output. Raises Unreachable with what it complained.

    With `stop`, or when cancelled, it is asked to end, and waited for.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    reading = asyncio.create_task(process.communicate())
    halt = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({reading, halt}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        halt.cancel()
        if process.returncode is None:
            _ask_group(process.pid, signal.SIGTERM)
            await process.wait()
    out, errors = await reading
    if stop is not None and stop.is_set() and process.returncode:
        raise Unreachable(f"{' '.join(command)} was stopped")
    if process.returncode:
        said = errors.decode("utf-8", "replace").strip()[-2000:]
        raise Unreachable(f"{' '.join(command)} ended with status {process.returncode}:\n{said}")
    return out.decode()


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])


async def _taken(url: str) -> bool:
    """Whether anything listens there, whatever it would answer."""
    at = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(at.hostname, at.port)
    except OSError:
        return False
    writer.close()
    return True


async def _answers(url: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(url) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """First ask; what is left of the group after that is killed, so that no child goes on computing."""
    _ask_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    _ask_group(process.pid, signal.SIGKILL)
    process.wait()


def _ask_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
