"""`sluice up`: from a data folder to a stack that answers, as much at once as the order allows; then watch over it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gateway.local.folder import DataFolder, FolderError
from gateway.local.lifeline import kill_group, spawn
from gateway.local.preflight import PreflightError, check_port, check_python
from gateway.local.process import Process, Supervisor, describe_exit, ended
from gateway.local.screen import Screen
from gateway.local.seeded import unchanged
from gateway.local.server import EmbeddedServer, ServerError, last_line, tail
from gateway.local.stack import PYTHON, Options, Stack, on_disk

__all__ = ["UpError", "up"]

READY_TIMEOUT_S = 120.0
"""A cold start on a slow disk takes long; a start that hangs should still say so."""
FAILURES_BEFORE_READY = 3
_LATER_S = 5.0
_ROOMY = 4
"""Processors from which data plane and console start at once beside a model's engine, which takes longest."""
_EXITING = "Application startup failed. Exiting."
"""What uvicorn says after it has said why."""


class UpError(RuntimeError):
    """The stack can't start; the message is one sentence."""


def up(folder: DataFolder, options: Options, screen: Screen) -> int:
    """Run the stack until told to stop; the exit status for the shell."""
    try:
        check_python()
        folder.open()
        if not folder.lock():
            pid = folder.read(folder.state).get("supervisor", "?")
            raise UpError(f"Sluice runs already on {folder.path} (process {pid}); stop it with `sluice down`.")
        if options.port == options.console_port:
            raise UpError(f"the API and the console can't share port {options.port}; see --port and --console-port.")
        check_port(options.host, options.port, "--port")
        check_port(options.host, options.console_port, "--console-port")
        return asyncio.run(_Up(folder, options, screen).run())
    except (PreflightError, FolderError, ServerError, UpError) as error:
        screen.error(str(error))
        return 1
    except OSError as error:  # a full disk, no more processes: what the system says is the reason
        screen.error(f"can't go on: {error}.")
        return 1
    finally:
        screen.close()


class _Up:
    """One life of the stack."""

    def __init__(self, folder: DataFolder, options: Options, screen: Screen) -> None:
        self.folder, self.options, self.screen = folder, options, screen
        self.stack = Stack(folder, options, dict(os.environ))
        self.supervisor = Supervisor(screen.note, self._write_state)
        self.ready = False
        self.started_ms = int(time.time() * 1000)
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._later: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._told_to_stop)
        watcher = asyncio.create_task(self.supervisor.watch())
        start, stop = asyncio.create_task(self._bring_up()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)
                return 1
            start.result()
            await asyncio.wait({stop, watcher}, return_when=asyncio.FIRST_COMPLETED)
            return 0
        finally:
            await self._shut_down(watcher, stop)

    async def _shut_down(self, *tasks: asyncio.Task[Any]) -> None:
        if self.ready:
            self.screen.note("stopping: gateway, engines, workers, servers")
        await self.supervisor.stop(self._hurry)
        if self._later is not None:
            self._later.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.folder.state.unlink(missing_ok=True)
        if self.ready:
            self.screen.note("stopped")

    def _told_to_stop(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    # -- bringing up -------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Engines need Valkey and the model; everything else needs the migrated database and Valkey."""
        async with _group() as group:
            valkey = group.create_task(self._serve(self.stack.valkey, 5))
            postgres = group.create_task(self._serve(self.stack.postgres, 5))
            group.create_task(self._start_engines(valkey))
            group.create_task(self._start_embeddings(valkey))
            group.create_task(self._start_record(valkey, postgres))
        await self._wait_ready()
        for spec in (self.stack.metering(), self.stack.celery()):  # who has been answered waits for neither
            self.supervisor.add(spec)
        credentials = await asyncio.to_thread(self._credentials)
        self.ready = True
        self._write_state()
        self.screen.ready(credentials)

    async def _serve(self, server: EmbeddedServer | None, stage: int) -> None:
        if server is None:
            return
        self.screen.begin(server.name)
        await asyncio.to_thread(server.prepare)
        process = self.supervisor.add(self.stack.server_spec(server, stage))
        while not await asyncio.to_thread(server.ready):
            self._check(process)
            await asyncio.sleep(0.02)
        self.screen.done(server.name)

    async def _pull_model(self, step: str, model: str) -> str:
        """The path of a model that is known by name, fetched if it isn't there; a path as it is."""
        if on_disk(model):
            return model
        self.screen.begin(step)
        command = ["-m", "engine.models", "pull", model, "--data-dir", str(self.folder.path), "--json"]
        name = step.replace(" ", "-")
        printed = await self._step(name, command, self.stack.environment(), partial(self._show_download, step))
        self.screen.done(step, model)
        return str(json.loads(printed)["path"])

    def _show_download(self, step: str, line: str) -> None:
        try:
            told = json.loads(line)
            self.screen.progress(step, told["done"], told["total"])
        except (ValueError, LookupError, TypeError):
            return  # something else it said; it is in the log

    async def _start_engines(self, valkey: asyncio.Task[None]) -> None:
        options = self.options
        simulated = options.backend == "simulated"
        model = options.pool if simulated else await self._pull_model("model", options.model)
        await valkey
        for number in range(1, options.engines + 1):
            self.supervisor.add(self.stack.engine(number, model))
        self.screen.note(f"engines: {options.engines} x {options.backend}, {options.engine_threads} thread(s) each")

    async def _start_embeddings(self, valkey: asyncio.Task[None]) -> None:
        if not self.options.embedding_model:
            return
        model = await self._pull_model("embedding model", self.options.embedding_model)
        await valkey
        self.supervisor.add(self.stack.embedding_engine(model))

    async def _start_record(self, valkey: asyncio.Task[None], postgres: asyncio.Task[None]) -> None:
        await asyncio.gather(valkey, postgres)
        environment = self.stack.environment()
        self.folder.write(self.folder.environment, dict(self.stack.kept_environment()))
        self.screen.begin("migrations and tenants")
        fresh = False
        if not self._key() or not await asyncio.to_thread(unchanged, self.folder, environment["DATABASE_URL"]):
            # One process for both: to start Django once more would take as long as either.
            command = ["-m", "django", "seed_demo", "--migrate", "--json"]
            created = json.loads(await self._step("migrations", command, environment))
            fresh = any(tenant.get("key") for tenant in created["tenants"].values())
        self.screen.done("migrations and tenants", "created" if fresh else "as they were")
        plane = self.supervisor.add(self.stack.data_plane())
        if self.options.backend != "simulated" and len(os.sched_getaffinity(0)) < _ROOMY:
            while not (await asyncio.to_thread(_get, self.options, "/healthz"))[0]:
                self._check(plane)
                await asyncio.sleep(0.05)
        self.supervisor.add(self.stack.console())

    async def _step(
        self,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str],
        follow: Callable[[str], None] | None = None,
    ) -> str:
        """Run a command to its end and give back what it printed; its standard error goes to a log of this run.

        `follow` is called with the log's newest line while it runs.
        """
        log, output = self.folder.log(name), self.folder.logs / f".{name}.{os.getpid()}"
        log.unlink(missing_ok=True)
        child = spawn([*PYTHON, *arguments], env=environment, log=log, output=output)
        try:
            waiting = asyncio.create_task(ended(child))
            while not (await asyncio.wait({waiting}, timeout=0.1 if follow else None))[0]:
                if follow is not None:
                    follow(last_line(log))
            if child.returncode != 0:
                how = describe_exit(child.returncode)
                raise UpError(f"{name} failed ({how}): {last_line(log)} (see {log})")
            return output.read_text()
        finally:
            kill_group(child.pid)
            child.wait()
            output.unlink(missing_ok=True)

    async def _wait_ready(self) -> None:
        self.screen.begin("engine and gateway")
        deadline = time.monotonic() + READY_TIMEOUT_S
        path = "/readyz" if self.options.pools else "/healthz"  # without an engine it is never ready, but alive
        while True:
            status, reason = await asyncio.to_thread(_get, self.options, path)
            console, _ = await asyncio.to_thread(_get, self.options, "/login/", self.options.console_port)
            if status == console == 200:
                missing = await asyncio.to_thread(_missing, self.options, self._key())
                if not missing:
                    break
                reason = f"no engine serves {', '.join(missing)} yet"
            for process in self.supervisor.processes.values():
                self._check(process)
            if time.monotonic() > deadline:
                raise UpError(
                    f"not ready after {READY_TIMEOUT_S:.0f} s ({reason}); see the logs in {self.folder.logs}."
                )
            await asyncio.sleep(0.1)
        self.screen.done("engine and gateway")

    def _check(self, process: Process) -> None:
        """Give up on a process that can't or won't stay up before the stack was ever ready."""
        code = process.child.returncode if process.child else None
        if process.failures >= FAILURES_BEFORE_READY or (process.failures and code in process.spec.hopeless):
            raise UpError(f"{process.spec.name} can't start: {_reason(process.spec.log)} (see {process.spec.log})")

    # -- what is kept ------------------------------------------------------------------------------------------------

    def _credentials(self) -> dict[str, Any]:
        kept = self.folder.read(self.folder.credentials)
        line = {
            "api_base": f"{self.options.api}/v1",
            "console_url": f"{self.options.console}/",
            "model": _served_model(self.options, self._key()),
            **({"embedding_model": self.options.embedding_pool} if self.options.embedding_model else {}),
            "admin": kept.get("admin"),
            "tenants": kept.get("tenants", {}),
        }
        self.folder.write(self.folder.credentials, line)
        return line

    def _key(self) -> str:
        """A key to ask the gateway with; empty when none is known."""
        kept = self.folder.read(self.folder.credentials)
        return next((t["key"] for t in kept.get("tenants", {}).values() if t.get("key")), "")

    def _write_state(self) -> None:
        """For `status`. Once all runs, a full disk is no reason to end it: what can't be written is written later."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        try:
            self.folder.write(self.folder.state, self._state())
        except OSError as error:
            if not self.ready:
                raise
            if not self.supervisor.stopping:
                self.screen.note(f"the state can't be written: {error.strerror}")
                self._later = asyncio.get_running_loop().call_later(_LATER_S, self._write_state)

    def _state(self) -> dict[str, Any]:
        return {
            "supervisor": os.getpid(),
            "started_ms": self.started_ms,
            "ready": self.ready,
            "stopping": self.supervisor.stopping,
            "api": self.options.api,
            "console": self.options.console,
            "processes": [p.describe() for p in self.supervisor.processes.values()],
        }


class _group:
    """A task group whose failure is the first error itself, not a group of errors."""

    async def __aenter__(self) -> asyncio.TaskGroup:
        self._tasks = asyncio.TaskGroup()
        return await self._tasks.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._tasks.__aexit__(*error)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


def _get(options: Options, path: str, port: int | None = None, key: str = "") -> tuple[int, str]:
    """Status (0: no answer) and body of a GET on this machine."""
    connection = http.client.HTTPConnection(options.visible_host.strip("[]"), port or options.port, timeout=5)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read(65536).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"no answer: {error}"
    finally:
        connection.close()


def _reason(log: Path) -> str:
    """The last error of a process, else the last thing it said; of a structured line, its detail."""
    errors = [line for line in tail(log).splitlines() if line.startswith("ERROR") and _EXITING not in line]
    line = errors[-1].removeprefix("ERROR:").strip() if errors else last_line(log)
    try:
        return str(json.loads(line)["detail"])
    except (ValueError, LookupError, TypeError):
        return line


def _models(options: Options, key: str) -> dict[str, bool]:
    """Whether an engine serves it, by model; empty when the key may not ask."""
    try:
        return {str(m["id"]): bool(m["available"]) for m in json.loads(_get(options, "/v1/models", key=key)[1])["data"]}
    except (ValueError, LookupError, TypeError):
        return {}


def _missing(options: Options, key: str) -> list[str]:
    """Of several pools those that have no engine yet; with one, or with no key to ask with, /readyz has to do."""
    served = _models(options, key) if len(options.pools) > 1 else {}
    return [pool for pool in options.pools if not served.get(pool)] if served else []


def _served_model(options: Options, key: str) -> str:
    """Our pool, or the first model the gateway lists if ours goes by another name; our pool when no key is known."""
    names = list(_models(options, key))
    return options.pool if options.pool in names or not names else names[0]
