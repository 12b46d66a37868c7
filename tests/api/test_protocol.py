"""The bounds on what precedes a request, with the protocol in this process so that its clock can be hurried."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.api import protocol


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """An answer that takes several times the limit for a head."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4):
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


async def converse(first: bytes) -> bytes:
    """All that a server says to a client that sends this and no more."""
    config = uvicorn.Config(slow, lifespan="off", timeout_keep_alive=1)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: protocol.JsonErrors(config, ServerState(), {}), "127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(first)
        async with asyncio.timeout(10):
            heard = await reader.read()
        writer.close()
        return heard
    finally:
        server.close()


@pytest.mark.parametrize("start", [b"", b"G", b"GET / HTTP/1.1\r\nHost: a\r\nX: y"])
def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    heard = asyncio.run(converse(start))
    assert heard.startswith(b"HTTP/1.1 408") and b'"request_timeout"' in heard


def test_an_answer_is_not_cut_off_by_the_head_of_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    heard = asyncio.run(converse(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP"))
    assert heard.startswith(b"HTTP/1.1 200") and b"end\r\n0\r\n" in heard
    assert heard.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 408" in heard
