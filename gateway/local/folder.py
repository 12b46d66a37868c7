"""The data folder: everything one installation keeps, and who may read it.

version            layout of this folder
lock               held by the running supervisor
state.json         what runs now: supervisor, ports, processes
environment.json   addresses and secrets as the processes got them (mode 0600)
credentials.json   what `up` printed: API base, admin, tenants' keys (mode 0600)
seeded.json        what the last start found in the database, by questions that the next one asks again (mode 0600)
secrets/           made on the first start, one secret a file (mode 0600)
logs/              one log per process, rotated by size
models/            pulled model files
celery/, static/   beat's memory; collected static files
postgres, valkey/  the embedded servers' homes (mode 0700, theirs); links when their user can't traverse to here
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.local.lifeline import Owner
from gateway.local.server import private_folder, reachable

__all__ = ["DataFolder", "FolderError"]

LAYOUT = "1"
FREE_BYTES_MIN = 512 * 1024 * 1024
"""A new cluster, its write-ahead log and the model take about 300 MiB."""

_SYSTEM_HOMES = Path("/var/lib/sluice")
_OURS = {
    *("version", "lock", "state.json", "environment.json", "credentials.json", "seeded.json", "secrets", "logs"),
    *("models", "celery", "static", "postgres", "valkey", "peers", "bench", ".cache"),
}
"""What may be in a folder without `version`: models are fetched before the first start; an older Sluice wrote none."""
_ANYWHERE = frozenset({"lost+found"})
"""What a file system of its own has at its root."""


class FolderError(RuntimeError):
    """The data folder can't be used; the message is one sentence."""


class DataFolder:
    """Paths, secrets and the lock of one data folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._lock: int | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def celery(self) -> Path:
        """Where beat keeps what it ran last."""
        return self.path / "celery"

    @property
    def credentials(self) -> Path:
        return self.path / "credentials.json"

    @property
    def seeded(self) -> Path:
        return self.path / "seeded.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def made(self) -> bool:
        """`open` has been here: it is a data folder of ours."""
        return (self.path / "version").is_file()

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def open(self) -> None:
        """Make or check the folder. Raises FolderError: someone else's, another layout, not writable, disk full."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_is_ours()
            self._close_to_others()
            write_private(self.path / "version", LAYOUT + "\n")
            for private in (self.logs, self.celery, self.path / "static"):
                private.mkdir(mode=0o700, exist_ok=True)
        except NotADirectoryError:
            raise FolderError(f"{self.path} is a file, not a folder; choose another --data-dir.") from None
        except FileExistsError:
            raise FolderError(f"{self.path} is a file, not a folder; choose another --data-dir.") from None
        except PermissionError:
            raise FolderError(f"no permission to write in {self.path}; choose another --data-dir.") from None
        except OSError as error:
            raise FolderError(f"can't use {self.path}: {error.strerror}.") from error
        free = shutil.disk_usage(self.path).free
        if free < FREE_BYTES_MIN:
            raise FolderError(
                f"the disk of {self.path} has {free >> 20} MiB left and Sluice needs {FREE_BYTES_MIN >> 20}; "
                "free some space or choose another --data-dir."
            )

    def _check_is_ours(self) -> None:
        version = self.path / "version"
        if version.is_symlink() or not version.exists():
            self._check_nothing_foreign()
            return
        owner = version.stat().st_uid
        if owner != os.geteuid():
            raise FolderError(f"{self.path} belongs to user {owner}; start as that user or choose another --data-dir.")
        found = version.read_text().strip()
        if found != LAYOUT:
            raise FolderError(
                f"{self.path} was made by another version of Sluice (layout {found}, this one reads {LAYOUT}); "
                "use that version or choose another --data-dir."
            )

    def _check_nothing_foreign(self) -> None:
        """Before anything is written or opened up: a folder that holds other things isn't taken over."""
        names = sorted(entry.name for entry in self.path.iterdir() if entry.name not in _ANYWHERE)
        foreign = [name for name in names if name not in _OURS and not _being_written(name)]
        if foreign:
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            raise FolderError(
                f"{self.path} is no data folder of Sluice and isn't empty ({', '.join(foreign[:3])}{more}); "
                "choose a new or an empty folder as --data-dir."
            )

    def _close_to_others(self) -> None:
        """Nobody else may put files here. The servers' unprivileged user must get through to its own; it can't list."""
        found = self.path.stat()
        if os.geteuid() == 0:
            self.path.chmod(0o711)
        elif found.st_uid == os.geteuid() and found.st_mode & 0o022:
            self.path.chmod(stat.S_IMODE(found.st_mode) & ~0o022)

    def lock(self, patience_s: float = 1.0) -> bool:
        """Take the folder for this process until it ends; False when another running one holds it.

        A status check holds the lock for an instant, hence the patience.
        """
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(handle)
                    return False
                time.sleep(0.05)
            else:
                self._lock = handle
                return True

    def locked(self) -> bool:
        """Is a supervisor running on this folder?"""
        try:
            handle = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(handle)

    def secret(self, name: str) -> str:
        """The secret called `name`, made at random the first time. Letters that need no quoting anywhere."""
        folder = self.path / "secrets"
        folder.mkdir(mode=0o700, exist_ok=True)
        file = folder / name
        try:
            return file.read_text().strip()
        except FileNotFoundError:
            value = secrets.token_hex(32)
            write_private(file, value + "\n")
            return value

    def server_home(self, name: str, owner: Owner | None) -> Path:
        """Where an embedded server lives: in this folder, or linked from here when `owner` can't traverse to it.

        The parents of a data folder are not ours to open (a checkout under a 0700 home), so the system's place for
        state takes the server's files then.
        """
        link = self.path / name
        if link.is_symlink() or link.exists():
            return link.resolve()
        if reachable(self.path, owner) or owner is None:
            return private_folder(link, owner)
        _SYSTEM_HOMES.mkdir(mode=0o711, parents=True, exist_ok=True)
        _SYSTEM_HOMES.chmod(0o711)
        home = private_folder(_SYSTEM_HOMES / f"{name}-{secrets.token_hex(6)}", owner)
        link.symlink_to(home)
        return home

    def keep(self, created: Mapping[str, Any]) -> None:
        """Put newly made secrets (the answer of `seed_demo`) into credentials.json; those made earlier stay."""
        kept = self.read(self.credentials)
        kept["admin"] = created.get("admin") or kept.get("admin") or {"username": "admin", "password": None}
        tenants = kept.setdefault("tenants", {})
        for name, tenant in created.get("tenants", {}).items():
            tenants[name] = {**tenant, "key": tenant.get("key") or tenants.get(name, {}).get("key")}
        self.write(self.credentials, kept)

    def read(self, path: Path) -> dict[str, Any]:
        """A JSON file of this folder; empty when missing or torn."""
        try:
            value = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, path: Path, value: dict[str, Any]) -> None:
        write_private(path, json.dumps(value) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, mode 0600 from its first byte on."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _being_written(name: str) -> bool:
    """A file that `write_private` was ended over: `.{name}.{pid}`."""
    _, _, rest = name.partition(".")
    target, _, pid = rest.rpartition(".")
    return name.startswith(".") and target in _OURS and pid.isdigit()
