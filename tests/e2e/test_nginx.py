"""The shipped nginx configuration passes every frame on as it comes, and a client's departure too."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import free_ports, until

SHIPPED = Path(__file__).resolve().parents[2] / "docker/nginx.conf"
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
INTERVAL_S = 0.25


class Upstream:
    """Answers every request with ten event-stream frames, 250 ms apart; knows when a client has left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]) if length else 0)
        gone = asyncio.create_task(reader.read(1))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(10):
            frame = f"data: {number}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(frame), frame))
            await writer.drain()
            if (await asyncio.wait({gone}, timeout=INTERVAL_S))[0]:
                self.left.set()
                break
        else:
            writer.write(b"0\r\n\r\n")
        writer.close()


@pytest.fixture
def fronted(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """nginx with the shipped configuration, its addresses alone replaced: its URL, and the port it asks."""
    if not Path(NGINX).exists():
        pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
    front, back = free_ports(2)
    text = SHIPPED.read_text().replace("gateway:8000", f"127.0.0.1:{back}").replace("console:8001", f"127.0.0.1:{back}")
    text = text.replace("listen 8080", f"listen 127.0.0.1:{front}").replace("/tmp/nginx.pid", str(tmp_path / "pid"))
    text = text.replace("access_log /dev/stdout plain", "access_log off")
    text = text.replace("http {", f"http {{ client_body_temp_path {tmp_path}/b; proxy_temp_path {tmp_path}/p;")
    configuration = tmp_path / "nginx.conf"
    configuration.write_text("daemon off;\n" + text)
    nginx = subprocess.Popen([NGINX, "-c", str(configuration), "-e", "stderr"])
    try:
        until((tmp_path / "pid").exists, 5, "nginx runs")
        yield f"http://127.0.0.1:{front}", back
    finally:
        nginx.terminate()
        nginx.wait(5)


@pytest.fixture
async def proxied(fronted: tuple[str, int]) -> AsyncIterator[tuple[str, Upstream]]:
    url, port = fronted
    upstream = Upstream()
    async with await asyncio.start_server(upstream.answer, "127.0.0.1", port):
        yield url, upstream


async def test_frames_arrive_as_they_were_sent(proxied: tuple[str, Upstream]) -> None:
    loop, arrivals = asyncio.get_running_loop(), []
    async with (
        httpx.AsyncClient() as client,
        client.stream(
            "POST", f"{proxied[0]}/v1/chat/completions", json={}, headers={"Accept-Encoding": "gzip"}
        ) as answer,
    ):
        assert "content-encoding" not in answer.headers
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                arrivals.append(loop.time())
    assert len(arrivals) == 10
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert all(0.15 <= gap <= 0.4 for gap in gaps), gaps


async def test_a_client_that_leaves_is_noticed_upstream(proxied: tuple[str, Upstream]) -> None:
    url, upstream = proxied
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/chat/completions", json={}) as answer:
        await anext(answer.aiter_lines())
    await asyncio.wait_for(upstream.left.wait(), 1.0)
