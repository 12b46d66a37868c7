"""The command's own sentences, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )


def test_manage_without_an_installation_is_one_sentence(tmp_path: Path) -> None:
    done = run("manage", "reconcile", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "nothing runs on" in done.stderr


def test_every_command_explains_itself() -> None:
    for command in (["up"], ["down"], ["status"], ["engine"], ["models", "pull"], ["sim"], ["replay"], ["bench"]):
        done = run(*command, "--help")
        assert done.returncode == 0, (command, done.stderr)
        assert "usage" in done.stdout.lower(), command
