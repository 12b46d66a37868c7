"""Servers that a benchmark starts: waited for, stopped whole, and their end told with its reason."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from gateway.bench.client import Unreachable
from gateway.bench.server import finished, running

SERVE = """
import http.server, os, subprocess, sys
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print(os.getpid(), child.pid, flush=True)
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Quiet).serve_forever()
"""


def ends(watches: list[int]) -> bool:
    """Whether all of these processes end within a minute; a killed one may need a moment on a busy machine."""
    return all(select.select([fd], [], [], 60)[0] for fd in watches)


async def test_a_server_and_its_children_are_gone_afterwards(tmp_path: Path, unused_tcp_port: int) -> None:
    log, url = tmp_path / "logs" / "x.log", f"http://127.0.0.1:{unused_tcp_port}/"
    command = [sys.executable, "-c", SERVE, str(unused_tcp_port)]
    async with running(command, log=log, ready=url, timeout_s=60) as start_s:
        assert start_s > 0
        pids = [int(n) for n in log.read_text().split()]
        watches = [os.pidfd_open(pid) for pid in pids]
        assert not select.select(watches, [], [], 0)[0] and os.getpgid(pids[0]) == pids[0]
        with pytest.raises(Unreachable, match="already answers"):
            async with running(command, log=log, ready=url, timeout_s=60):
                pass
    assert ends(watches)


async def test_a_server_that_ends_is_told_with_the_end_of_its_log(tmp_path: Path, unused_tcp_port: int) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(Unreachable, match="no such model"):
        async with running(command, log=tmp_path / "x.log", ready=f"http://127.0.0.1:{unused_tcp_port}/", timeout_s=60):
            pass


async def test_a_server_that_ends_while_it_is_used_is_told(tmp_path: Path, unused_tcp_port: int) -> None:
    log, url = tmp_path / "x.log", f"http://127.0.0.1:{unused_tcp_port}/"
    with pytest.raises(Unreachable, match="status -9 while it was used"):
        async with running([sys.executable, "-c", SERVE, str(unused_tcp_port)], log=log, ready=url, timeout_s=60):
            os.kill(int(log.read_text().split()[0]), signal.SIGKILL)


async def test_a_port_that_others_listen_on_is_refused_whatever_they_speak(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ready = f"http://127.0.0.1:{other.getsockname()[1]}/health"
        with pytest.raises(Unreachable, match="take another --port"):
            async with running(["true"], log=tmp_path / "x.log", ready=ready, timeout_s=60):
                pass


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_command_that_is_stopped_has_ended(cancelled: bool, tmp_path: Path) -> None:
    told, stop = tmp_path / "pid", asyncio.Event()
    script = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(f'{{os.getpid()}} '); time.sleep(600)"
    work = asyncio.create_task(finished([sys.executable, "-c", script], stop=stop))
    pid = await asyncio.to_thread(read_pid, told)
    if cancelled:
        work.cancel()
    stop.set()
    with pytest.raises(asyncio.CancelledError if cancelled else Unreachable):
        await work
    assert select.select([pid], [], [], 0)[0]


def read_pid(told: Path) -> int:
    """A handle of the process that writes its number and a blank there."""
    while not told.exists() or not told.read_text().endswith(" "):
        time.sleep(0.02)
    return os.pidfd_open(int(told.read_text()))


async def test_a_command_tells_what_it_printed_or_why_it_failed() -> None:
    assert await finished([sys.executable, "-c", "print('fine')"]) == "fine\n"
    with pytest.raises(Unreachable, match="broken"):
        await finished([sys.executable, "-c", "raise SystemExit('broken')"])


async def test_a_server_that_is_never_ready_is_given_up_when_asked(tmp_path: Path, unused_tcp_port: int) -> None:
    stop = asyncio.Event()
    stop.set()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ready = f"http://127.0.0.1:{unused_tcp_port}/"
    with pytest.raises(Unreachable, match="stopped before"):
        async with running(command, log=tmp_path / "x.log", ready=ready, timeout_s=60, stop=stop):
            pass
