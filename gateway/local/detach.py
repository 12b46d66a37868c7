"""`up --detach`: start the supervisor in a session of its own, show its progress, return when it is ready."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import NoReturn

from gateway.local.folder import DataFolder, FolderError
from gateway.local.screen import replay, terminal_screen
from gateway.local.stack import PACKAGES, PYTHON, Options

__all__ = ["detach"]


def detach(folder: DataFolder, options: Options) -> int:
    """Exit status 0 and one line of JSON on standard output, or the error and 1."""
    screen = terminal_screen()
    try:
        folder.open()
    except FolderError as error:
        screen.error(str(error))
        return 1
    reader, writer = os.pipe()
    log = folder.log("supervisor").open("ab")
    child = subprocess.Popen(
        [*PYTHON, "-m", "gateway.cli", "up", *_arguments(folder, options), "--ready-fd", str(writer)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(writer,),
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH", "")]))},
    )
    os.close(writer)
    log.close()
    previous = {s: signal.signal(s, lambda *_: _give_up(child)) for s in (signal.SIGINT, signal.SIGTERM)}
    with os.fdopen(reader) as events:
        credentials = replay(events, screen)
    for number, handler in previous.items():
        signal.signal(number, handler)
    screen.close()
    if credentials is None:
        child.wait()
        return 1
    sys.stdout.write(json.dumps(credentials) + "\n")
    sys.stdout.flush()
    return 0


def _arguments(folder: DataFolder, options: Options) -> list[str]:
    pairs = {
        "--host": options.host,
        "--port": options.port,
        "--console-port": options.console_port,
        "--data-dir": folder.path,
        "--engines": options.engines,
        "--threads": options.threads,
        "--backend": options.backend,
        "--model": options.model,
        "--embedding-model": options.embedding_model,
        "--quantization": options.quantization,
        "--engine-options": options.engine_options,
    }
    return [f"{name}={value}" for name, value in pairs.items()]


def _give_up(child: subprocess.Popen[bytes]) -> NoReturn:
    """Interrupted before it was ready: it stops everything again."""
    child.terminate()
    child.wait()
    raise SystemExit(130)
