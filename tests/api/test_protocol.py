"""The bounds on what a client may send and how slowly; the server is in this process so that its clock is ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import uvicorn
from django.core.handlers.asgi import ASGIHandler
from uvicorn.server import ServerState

from gateway.api import protocol
from gateway.api.cors import cross_origin
from gateway.api.handler import DataRequest
from gateway.api.responses import EventStream
from gateway.bounded import bounded


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """An answer that takes several times the limit for a head."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4):
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


async def converse(first: bytes, application: Any = slow) -> bytes:
    """All that a server says to a client that sends this and no more."""
    config = uvicorn.Config(application, lifespan="off", timeout_keep_alive=1, access_log=False)
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


async def events(scope: Any, receive: Any, send: Any) -> None:
    """A stream whose first event goes out with its head."""
    response = EventStream("text/event-stream", {"x-queue-depth": "3"})
    response.prepare("request-1", scope["extensions"][protocol.LANE])
    assert response.prepared
    response.begin("cached", b"data: 1\n\n")
    assert not response.prepared

    async def rest() -> AsyncGenerator[bytes, None]:
        yield b"data: 2\n\n"

    response.events = rest()
    await response.send_to(send)


@pytest.mark.parametrize("close", [False, True])
def test_the_head_that_goes_out_with_the_first_event_is_the_one_that_would_have_gone_before_it(close: bool) -> None:
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nOrigin: https://page.example\r\nContent-Length: 0\r\n"
    request += b"Connection: close\r\n\r\n" if close else b"\r\n"
    application = cross_origin(events, frozenset({"https://page.example"}), DataRequest.urlconf)
    head, _, body = asyncio.run(converse(request, application)).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"http/1.1 200 ok" and len(set(lines)) == len(lines)
    assert {
        b"content-type: text/event-stream",
        b"transfer-encoding: chunked",
        b"x-queue-depth: 3",
        b"x-request-id: request-1",
        b"x-content-type-options: nosniff",
        b"server-timing: cached",
        b"vary: origin",
        b"access-control-allow-origin: https://page.example",
    } <= set(lines)
    assert (b"connection: close" in lines) == close
    assert body == b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n"


_SIGN_IN = b"POST /login/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"Content-Length: 100\r\n\r\nusername=", 408),
        (b"Transfer-Encoding: chunked\r\n\r\n9\r\nusername=\r\n", 408),
        (b"Content-Length: 10000000\r\n\r\n" + b"a" * 1001, 413),
        (b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"a" * 1001 + b"\r\n", 413),
    ],
)
def test_the_console_does_not_wait_for_a_body_that_does_not_come_nor_keep_one_that_does_not_end(
    rest: bytes, status: int
) -> None:
    heard = asyncio.run(converse(_SIGN_IN + rest, bounded(ASGIHandler(), 1000, timeout_s=0.2)))
    assert heard.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in heard
