"""The processes of one installation: their commands, their environment, and the order they start in."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen

from gateway.local.folder import DataFolder
from gateway.local.lifeline import server_owner, spawn
from gateway.local.postgres import PostgresServer
from gateway.local.preflight import cores
from gateway.local.process import Spec
from gateway.local.server import EmbeddedServer
from gateway.local.valkey import ValkeyServer

__all__ = ["DEFAULT_EMBEDDING_MODEL", "DEFAULT_MODEL", "PACKAGES", "PYTHON", "Options", "Stack", "on_disk"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_EMBEDDING_MODEL = "all-minilm-l6-v2"
PYTHON = (sys.executable, "-P")
GRACE_S = 10
"""How long the data plane lets running streams go on when it stops."""
DRAIN_S = 10
_BEHIND = 10
"""Niceness of what no request waits for: on a full machine it takes the processor after those that answer."""
_ENGINE_HOPELESS = frozenset({1, 2})
"""engine.serve: the model can't be loaded; the command line is wrong."""
PACKAGES = str(Path(__file__).resolve().parents[2])
"""Where our packages are installed or checked out."""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `up`."""

    host: str = "127.0.0.1"
    port: int = 8000
    console_port: int = 8001
    engines: int = 1
    threads: int = 0
    """Per engine; 0: the cores but one, shared among the engines."""
    backend: str = "causal_lm"
    model: str = DEFAULT_MODEL
    """A name known to `sluice models`, or a path."""
    embedding_model: str = ""
    """Likewise, for one more engine with a pool of its own; empty: none."""
    quantization: str = "none"
    """none or int8, of the causal_lm engines."""
    engine_options: str = ""
    """More words for the command line of the model's engines, quoted as in a shell."""

    @property
    def engine_threads(self) -> int:
        return self.threads or max(1, (cores() - 1) // max(1, self.engines))

    @property
    def visible_host(self) -> str:
        """Where a client on this machine finds us."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"[{host}]" if ":" in host else host

    @property
    def api(self) -> str:
        return f"http://{self.visible_host}:{self.port}"

    @property
    def console(self) -> str:
        return f"http://{self.visible_host}:{self.console_port}"

    @property
    def pool(self) -> str:
        """One pool for the engines of the model, named after what they serve."""
        return "simulated" if self.backend == "simulated" else _pool_of(self.model)

    @property
    def embedding_pool(self) -> str:
        return _pool_of(self.embedding_model)

    @property
    def pools(self) -> list[str]:
        """All that our engines serve."""
        return [self.pool] * bool(self.engines) + [self.embedding_pool] * bool(self.embedding_model)


def on_disk(model: str) -> bool:
    """A path, not a name."""
    return Path(model).exists()


def _pool_of(model: str) -> str:
    name = Path(model).name.removesuffix(".gguf") if on_disk(model) else model
    return re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "model"


class Stack:
    """Commands and environment of every process over one data folder."""

    def __init__(self, folder: DataFolder, options: Options, given: dict[str, str]) -> None:
        """`given` is the caller's environment; its DATABASE_URL and REDIS_URL replace the embedded servers."""
        self.folder, self.options, self._given = folder, options, given
        self.postgres = None if given.get("DATABASE_URL") else self._server(PostgresServer, "postgres")
        self.valkey = None if given.get("REDIS_URL") else self._server(ValkeyServer, "valkey")

    def _server(self, kind: type[EmbeddedServer], name: str) -> EmbeddedServer:
        owner = server_owner(self.folder.path / name / "data")
        home = self.folder.server_home(name, owner)
        return kind(home, home / "run", self.folder.secret(f"{name}-password"), self.folder.log(name), owner)

    def environment(self) -> dict[str, str]:
        """Of every process of ours. Ask after the servers have been prepared: that settles where their sockets are."""
        ours = {
            "DJANGO_SETTINGS_MODULE": "gateway.settings",
            "DATABASE_URL": self._given.get("DATABASE_URL") or getattr(self.postgres, "url", ""),
            "REDIS_URL": self._given.get("REDIS_URL") or getattr(self.valkey, "url", ""),
            "SLUICE_SECRET_KEY": self._given.get("SLUICE_SECRET_KEY") or self.folder.secret("secret-key"),
            "SLUICE_KEY_PEPPER": self._given.get("SLUICE_KEY_PEPPER") or self.folder.secret("key-pepper"),
            "SLUICE_DATA_DIR": str(self.folder.path),
            "SLUICE_ALLOWED_HOSTS": self._given.get("SLUICE_ALLOWED_HOSTS")
            or ",".join(dict.fromkeys(["127.0.0.1", "localhost", "[::1]", self.options.visible_host])),
            "PYTHONUNBUFFERED": "1",
            # With -P below: modules come from where we are installed, never from the folder `sluice` was called in.
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGES, self._given.get("PYTHONPATH", "")])),
        }
        return {**self._given, **ours}

    def kept_environment(self) -> dict[str, str]:
        """What `sluice manage` and the like need of it, for environment.json."""
        return {k: v for k, v in self.environment().items() if k.startswith("SLUICE_") or k.endswith("_URL")}

    # -- the servers -------------------------------------------------------------------------------------------------

    def server_spec(self, server: EmbeddedServer, stage: int) -> Spec:
        return Spec(server.name, server.spawn, stage, server.stop_steps, server.log, prepare=server.prepare)

    # -- ours --------------------------------------------------------------------------------------------------------

    def data_plane(self) -> Spec:
        return self._python(
            "gateway", 1, [*self._uvicorn("data", self.options.port)], ((signal.SIGTERM, GRACE_S + 2.0),)
        )

    def console(self) -> Spec:
        return self._python("console", 1, [*self._uvicorn("console", self.options.console_port)])

    def engine(self, number: int, model: str) -> Spec:
        """`model`: path of the file or folder, or for the simulated backend a name."""
        quantization = ("--quantization", self.options.quantization) if self.options.quantization != "none" else ()
        more = (*quantization, *shlex.split(self.options.engine_options))
        return self._engine(f"engine-{number}", self.options.pool, self.options.backend, model, *more)

    def embedding_engine(self, model: str) -> Spec:
        """`model`: path of the folder."""
        return self._engine("engine-embeddings", self.options.embedding_pool, "embedding", model)

    def _engine(self, name: str, pool: str, backend: str, model: str, *more: str) -> Spec:
        arguments = ["engine.serve", "--pool", pool, "--backend", backend, "--model", model, *more]
        arguments += ["--threads", str(self.options.engine_threads), "--drain-seconds", str(DRAIN_S)]
        steps = ((signal.SIGTERM, DRAIN_S + 3.0),)
        spec = self._python(name, 2, ["-m", *arguments], steps, self._openmp())
        return replace(spec, hopeless=_ENGINE_HOPELESS)

    def _openmp(self) -> dict[str, str]:
        """Has to stand before the process starts."""
        return {"OMP_NUM_THREADS": str(self.options.engine_threads)}

    def metering(self) -> Spec:
        return self._python("metering", 3, ["-m", "django", "settle"], nice=_BEHIND)

    def celery(self) -> Spec:
        schedule = self.folder.celery / "schedule"
        arguments = ["celery", "-A", "gateway.celery", "worker", "-B", "-s", str(schedule), "--concurrency", "1"]
        arguments += ["--loglevel", "INFO", "--without-gossip", "--without-mingle"]
        return self._python("celery", 3, ["-m", *arguments, "-I", "gateway.local.celery_children"], nice=_BEHIND)

    def _uvicorn(self, application: str, port: int) -> list[str]:
        arguments = ["-m", "uvicorn", f"gateway.asgi:{application}", "--host", self.options.host, "--port", str(port)]
        arguments += ["--http", "gateway.api.protocol:JsonErrors"]
        # Longer than a reverse proxy keeps an idle connection (nginx: 60 s), else it reuses one that we just closed.
        arguments += ["--timeout-keep-alive", "75", "--timeout-graceful-shutdown", str(GRACE_S)]
        return [*arguments, "--no-access-log", "--no-server-header"]

    def _python(
        self,
        name: str,
        stage: int,
        arguments: list[str],
        stop_steps: tuple[tuple[int, float], ...] = ((signal.SIGTERM, 10.0),),
        more: Mapping[str, str] | None = None,
        nice: int = 0,
    ) -> Spec:
        command, log = [*PYTHON, *arguments], self.folder.log(name)
        environment = {**(more or {}), **self.environment()}

        def start() -> Popen[bytes]:
            child = spawn(command, env=environment, log=log)
            if nice:
                # Before it has started a thread or a child of its own: those inherit it.
                os.setpriority(os.PRIO_PROCESS, child.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
            return child

        return Spec(name, start, stage, stop_steps, log)
