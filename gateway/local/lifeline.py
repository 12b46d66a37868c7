"""Children that can't outlive us: spawn with a parent-death signal, an optional other user, and a log file.

Linux sends the parent-death signal when the *thread* that spawned the child ends, so spawn from a thread that lives as
long as the process (the main thread). The setting is lost on a change of credentials; it is therefore set after it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Owner", "die_with_parent", "kill_group", "run", "server_owner", "spawn", "stop"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
"""Loaded at import: between fork and exec nothing may be imported."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The unprivileged user that servers run as when we are root."""

    uid: int
    gid: int


NOBODY = Owner(65534, 65534)
"""Has an entry in /etc/passwd everywhere, which initdb asks for."""


def server_owner(data: Path | None = None) -> Owner | None:
    """Who runs the servers: None (ourselves) unless we are root; the owner of existing `data` if that isn't root."""
    if os.geteuid() != 0:
        return None
    if data is not None and data.exists() and data.stat().st_uid != 0:
        stat = data.stat()
        return Owner(stat.st_uid, stat.st_gid)
    return NOBODY


def die_with_parent(death_signal: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel for `death_signal` when the parent goes. With `parent`: exit at once if it has gone already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _lifeline(death_signal: int) -> Callable[[], None]:
    parent = os.getpid()
    return lambda: die_with_parent(death_signal, parent)


def spawn(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    log: Path,
    owner: Owner | None = None,
    death_signal: int = signal.SIGKILL,
    cwd: Path | None = None,
    output: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own (the terminal's Ctrl-C reaches only us), its output appended to `log`.

    With `output`, standard output goes to that file instead and `log` gets standard error only.
    """
    with log.open("ab") as errors, (output or log).open("ab") as out:
        return subprocess.Popen(
            [str(a) for a in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            user=owner.uid if owner else None,
            group=owner.gid if owner else None,
            extra_groups=[] if owner else None,
            umask=0o077,
            # Safe here: the function calls prctl and getppid only, both through objects that exist already.
            preexec_fn=_lifeline(death_signal),
        )


def run(
    argv: Sequence[str | Path], *, env: Mapping[str, str], owner: Owner | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a short tool to its end; it dies with us too."""
    return subprocess.run(
        [str(a) for a in argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=dict(env),
        cwd=cwd,
        user=owner.uid if owner else None,
        group=owner.gid if owner else None,
        extra_groups=[] if owner else None,
        umask=0o077,
        preexec_fn=_lifeline(signal.SIGKILL),
    )


def stop(child: subprocess.Popen[bytes], steps: Sequence[tuple[int, float]]) -> int:
    """Send each (signal, seconds to wait) in turn until the child has gone, at last SIGKILL to its whole group."""
    for number, patience_s in steps:
        if child.poll() is not None:
            break
        child.send_signal(number)
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    kill_group(child.pid)
    return child.wait()


def kill_group(leader: int) -> None:
    """SIGKILL whatever is left of the session that `leader` opened."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
