"""What the embedded servers share: binaries the server's user can reach, private folders, leftovers, start and stop."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.local.lifeline import Owner, run, spawn, stop

__all__ = ["EmbeddedServer", "ServerError", "last_line", "private_folder", "reachable", "socket_folder", "tail"]

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC"}
"""The servers' whole environment: nothing of the caller's (secrets, LD_PRELOAD, PG*) reaches them."""

_SOCKET_PATH_MAX = 107  # sun_path is 108 bytes including the terminating zero (unix(7))
_PLAIN_PATH = re.compile(r"[\w./+-]+")
"""Paths that need no quoting in a server's configuration, nor in a libpq host list (where a comma separates hosts)."""


class ServerError(RuntimeError):
    """A server can't start; the message is one sentence for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of an earlier run that still works on our data."""

    pid: int
    name: str


def reachable(path: Path, owner: Owner | None) -> bool:
    """Can `owner` traverse down to and execute (a folder: enter) `path`? Tried as that user: modes aren't all."""
    if owner is None:
        return os.access(path, os.X_OK)
    return run(["/bin/sh", "-c", 'test -x "$0"', path], env=ENVIRONMENT, owner=owner).returncode == 0


def private_folder(path: Path, owner: Owner | None) -> Path:
    """Make `path` a folder of mode 0700 that belongs to the server's user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if owner is not None:
        os.chown(path, owner.uid, owner.gid)
    path.chmod(0o700)
    return path


def socket_folder(wanted: Path, owner: Owner | None, longest_name: str) -> Path:
    """A 0700 folder whose sockets have legal paths: `wanted`, or a short one named after it in the temp folder.

    Raises ServerError when that name is taken by someone else.
    """
    room = _SOCKET_PATH_MAX - len(longest_name) - 1
    if len(os.fsencode(wanted)) <= room and _PLAIN_PATH.fullmatch(str(wanted)):
        private_folder(wanted, owner)
        if reachable(wanted, owner):
            return wanted
    short = Path(tempfile.gettempdir()) / f"sluice-{hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]}"
    try:
        short.mkdir(mode=0o700)
    except FileExistsError:
        stat = short.lstat()
        allowed = {os.geteuid(), owner.uid if owner else os.geteuid()}
        if short.is_symlink() or stat.st_uid not in allowed:
            raise ServerError(f"{short} belongs to another user; remove it or choose a shorter --data-dir.") from None
    return private_folder(short, owner)


def tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def last_line(log: Path) -> str:
    """The last thing a process said."""
    return next((line.strip() for line in reversed(tail(log).splitlines()) if line.strip()), "no message")


class EmbeddedServer:
    """One server process over a private data folder. `start` is `prepare`, `spawn` and waiting for `ready`."""

    name = ""
    program = ""
    death_signal: int = signal.SIGTERM
    stop_steps: tuple[tuple[int, float], ...] = ((signal.SIGTERM, 15.0),)

    def __init__(self, home: Path, sockets: Path, password: str, log: Path, owner: Owner | None = None) -> None:
        self.home, self.sockets, self.password, self.log, self.owner = home, sockets, password, log, owner
        self.child: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        """The folder the server makes its working directory."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Blocking: make the data folder fit to start on, stop leftovers."""
        raise NotImplementedError

    def command(self) -> list[str | Path]:
        """What starts the server."""
        raise NotImplementedError

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process. Call it from a thread that lives as long as the server should."""
        self.child = spawn(
            self.command(),
            env=ENVIRONMENT,
            log=self.log,
            owner=self.owner,
            death_signal=self.death_signal,
            cwd=self.data,
        )
        return self.child

    def ready(self) -> bool:
        """Does it accept connections? Raises ServerError when it has ended instead."""
        raise NotImplementedError

    def start(self, timeout_s: float = 30.0) -> None:
        """Prepare, spawn and wait."""
        self.prepare()
        self.spawn()
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > deadline:
                self.stop()
                raise ServerError(f"{self.name} was not ready after {timeout_s:.0f} s; see {self.log}.")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop cleanly; harmless when it isn't running."""
        if self.child is not None:
            stop(self.child, self.stop_steps)
            self.child = None

    def check_alive(self) -> None:
        """Raise ServerError with the likely cause if the process has ended."""
        if self.child is not None and self.child.poll() is not None:
            raise ServerError(self.explain(tail(self.log, 12)))

    def explain(self, output: str) -> str:
        """One sentence from the end of the server's log."""
        if "No space left on device" in output:
            return f"{self.name} can't start: the disk that holds {self.home} is full."
        if "Permission denied" in output:
            return f"{self.name} can't start: its files in {self.home} are not its own; see {self.log}."
        return f"{self.name} ended while starting ({last_line(self.log)}); see {self.log}."

    def stop_leftovers(self) -> None:
        """Stop processes of an earlier run on this data: gently, then for good."""
        for number, patience_s in (*self.stop_steps, (signal.SIGKILL, 5.0)):
            found = list(self.leftovers())
            if not found:
                return
            for leftover in found:
                try:
                    os.kill(leftover.pid, number)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + patience_s
            while list(self.leftovers()) and time.monotonic() < deadline:
                time.sleep(0.05)
        raise ServerError(f"an earlier {self.name} on {self.home} does not stop (process {found[0].pid}).")

    def leftovers(self) -> Iterator[Leftover]:
        """Processes named like the server whose working directory is our data, or whose command line names it.

        A server of another user hides its working directory from a root without CAP_SYS_PTRACE (containers).
        """
        data = str(self.data.resolve())
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if (entry / "comm").read_text().strip() != self.program:
                    continue
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                if data in words or str(self.sockets) in words or str((entry / "cwd").readlink()) == data:
                    yield Leftover(int(entry.name), self.program)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue


def copy_tree(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Copy `names` of `source` to `target` all or nothing: readable by everyone, written by nobody but us."""
    if target.exists():
        return
    building = target.with_name(f"{target.name}.{os.getpid()}")
    for name in names:
        origin = source / name
        if origin.is_dir():
            shutil.copytree(origin, building / name, symlinks=True)
        else:
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, building / name)
    for path in (building, *building.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    building.rename(target)
