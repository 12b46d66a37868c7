"""What `sluice up` says when it can't start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gateway.local.up import _reason


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
    log.write_text('{"level": "info"}\n{"level": "error", "detail": "not a GGUF file"}\n')
    assert _reason(log) == "not a GGUF file"
