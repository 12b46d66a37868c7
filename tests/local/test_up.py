"""What `sluice up` says when it can't start, and what does not end it once it runs."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from engine.serve.log import Log
from gateway.local.folder import DataFolder
from gateway.local.screen import PlainScreen
from gateway.local.stack import Options
from gateway.local.up import _reason, _Up


def test_one_port_for_two_servers_is_refused(tmp_path: Path) -> None:
    command = ["-m", "gateway.cli", "up", "--data-dir", str(tmp_path / "data"), "--port", "9", "--console-port", "9"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "can't share port 9;" in done.stderr


def test_the_reason_is_the_last_error(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text(
        "INFO:  Started\nERROR:    [Errno 98] address already in use\nINFO:     Application shutdown complete.\n"
    )
    assert _reason(log) == "[Errno 98] address already in use"
    log.write_text("ERROR:    it was made by another\nERROR:    Application startup failed. Exiting.\n")
    assert _reason(log) == "it was made by another"
    log.write_text('{"level": "info"}\n{"level": "error", "detail": "not a GGUF file"}\n')
    assert _reason(log) == "not a GGUF file"


@pytest.fixture
def full() -> Iterator[IO[str]]:
    """A file on a full disk: each write there answers "No space left on device"."""
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as stream:
        yield stream


def test_what_runs_goes_on_when_its_state_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: IO[str]
) -> None:
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.setenv(name, "unused://")
    asyncio.run(_write_without_a_folder(DataFolder(tmp_path / "data"), full))


async def _write_without_a_folder(folder: DataFolder, full: IO[str]) -> None:
    """A folder that isn't there fails every write, as a full disk does."""
    running = _Up(folder, Options(), PlainScreen(full))
    with pytest.raises(OSError):
        running._write_state()
    running.ready = True
    running._write_state()
    assert running._later is not None
    folder.open()
    running._write_state()
    assert folder.read(folder.state)["ready"] and running._later is None


def test_an_engine_outlives_a_log_that_can_not_be_written(full: IO[str]) -> None:
    Log("info", full, engine="e1").error("nobody reads this")
