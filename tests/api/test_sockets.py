"""The WebSocket: who may open it, many requests at once, cancel, and how it closes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.admission.test_limits import open_requests, until
from tests.api.test_chat import ASK
from tests.dispatch.test_ends import finals, outcomes
from tests.harness import Gateway

CHAT = "/v1/chat/completions"


def opened(gateway: Gateway, tenant: str | None = "alpha", **options: Any) -> connect:
    headers = dict(options.pop("headers", {}))
    if tenant is not None:
        headers["Authorization"] = f"Bearer {gateway.stack.keys[tenant]}"
    path = options.pop("path", "/v1/stream")
    return connect(f"ws://127.0.0.1:{gateway.port}{path}", additional_headers=headers, **options)


@pytest.fixture
async def socket(gateway: Gateway) -> AsyncIterator[ClientConnection]:
    async with opened(gateway) as connection:
        assert (await receive(connection))["type"] == "ready"
        yield connection


async def say(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def ask(socket: ClientConnection, name: str, **fields: Any) -> None:
    await say(socket, type="request", id=name, path=CHAT, body={**ASK, "stream": True, **fields})


async def receive(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(10):
        return json.loads(await socket.recv())


async def closed_with(socket: ClientConnection) -> int:
    async with asyncio.timeout(12):
        try:
            while True:
                await socket.recv()
        except ConnectionClosed as closing:
            assert closing.rcvd is not None
            return closing.rcvd.code


async def answers(socket: ClientConnection, names: set[str]) -> dict[str, list[dict[str, Any]]]:
    """All messages by request, until each of them is done."""
    got: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    left = set(names)
    while left:
        message = await receive(socket)
        got[message["id"]].append(message)
        if message["type"] in ("done", "error"):
            left.remove(message["id"])
    return got


def text(messages: list[dict[str, Any]]) -> str:
    chunks = [m["data"] for m in messages if m["type"] == "chunk"]
    return "".join(x["delta"].get("content") or "" for c in chunks for x in c["choices"])


async def test_many_requests_at_once_each_get_their_own_text(socket: ClientConnection, client: Any) -> None:
    names = {str(i) for i in range(8)}
    for name in names:
        await ask(socket, name, seed=int(name))
    got = await answers(socket, names)
    for name in names:
        whole = client.post("/chat/completions", json={**ASK, "seed": int(name)}).json()
        assert text(got[name]) == whole["choices"][0]["message"]["content"]
        assert got[name][0]["type"] == "accepted" and got[name][0]["request"]


async def test_a_whole_answer_and_a_text_completion(socket: ClientConnection) -> None:
    await say(socket, type="request", id="a", path=CHAT, body=ASK)
    await say(socket, type="request", id="b", path="/v1/completions", body={"model": "sim", "prompt": "x"})
    got = await answers(socket, {"a", "b"})
    assert got["a"][1]["data"]["object"] == "chat.completion" and got["b"][1]["data"]["object"] == "text_completion"


async def test_errors_are_of_one_request_and_the_socket_goes_on(socket: ClientConnection) -> None:
    await ask(socket, "bad", n=0)
    (error,) = (await answers(socket, {"bad"}))["bad"]
    assert error["error"]["param"] == "n" and error["error"]["type"] == "invalid_request_error"
    await say(socket, type="request", id="lost", path="/v1/nothing", body={})
    assert (await answers(socket, {"lost"}))["lost"][0]["error"]["code"] == "not_found"
    await ask(socket, "good")
    assert (await answers(socket, {"good"}))["good"][-1]["type"] == "done"


async def test_an_id_in_use_is_refused(socket: ClientConnection) -> None:
    await ask(socket, "x", max_tokens=5000)
    assert (await receive(socket))["type"] == "accepted"
    await ask(socket, "x")
    while (message := await receive(socket))["type"] == "chunk":
        pass
    assert message["error"]["param"] == "id"


async def test_cancel_frees_what_the_request_held(gateway: Gateway) -> None:
    async with opened(gateway, "delta") as socket:
        await receive(socket)
        await ask(socket, "long", max_tokens=5000)
        request = (await receive(socket))["request"]
        assert (await receive(socket))["type"] == "chunk"
        await say(socket, type="cancel", id="long")
        await until(lambda: open_requests(gateway.stack, "delta") == 0, 1.0)
        await until(lambda: outcomes(gateway.stack, request) and finals(gateway.stack, request))
        assert finals(gateway.stack, request)[0].reason == "abort"
        await ask(socket, "long")
        assert "done" in [m["type"] for m in (await answers(socket, {"long"}))["long"]]


async def test_a_dropped_socket_cancels_all_its_requests(gateway: Gateway) -> None:
    async with opened(gateway, "delta") as socket:
        await receive(socket)
        for i in range(3):
            await ask(socket, str(i), max_tokens=5000)
        await until(lambda: open_requests(gateway.stack, "delta") == 3)
        socket.transport.abort()
        await until(lambda: open_requests(gateway.stack, "delta") == 0, 1.0)


async def test_a_closing_handshake_cancels_all_its_requests(gateway: Gateway) -> None:
    async with opened(gateway, "delta") as socket:
        await receive(socket)
        for i in range(3):
            await ask(socket, str(i), max_tokens=5000)
        await until(lambda: open_requests(gateway.stack, "delta") == 3)
        # This client reads no further, so it never sees the answer to its close; the server must not wait for it.
        closing = asyncio.create_task(socket.close())
        await until(lambda: open_requests(gateway.stack, "delta") == 0, 1.0)
        socket.transport.abort()
        await closing


async def test_the_key_may_come_in_the_first_message(gateway: Gateway) -> None:
    async with opened(gateway, None) as socket:
        await say(socket, type="auth", key=gateway.stack.keys["alpha"])
        assert (await receive(socket))["type"] == "ready"
        await ask(socket, "a")
        assert (await answers(socket, {"a"}))["a"][-1]["type"] == "done"


async def test_without_a_good_key_it_closes(gateway: Gateway) -> None:
    async with opened(gateway, "revoked") as socket:
        assert (await receive(socket))["error"]["code"] == "invalid_api_key"
        assert await closed_with(socket) == 4401
    async with opened(gateway, None) as socket:
        await say(socket, type="auth", key="sk-nonsense")
        assert await closed_with(socket) == 4401
    async with opened(gateway, None) as socket:
        await ask(socket, "a")
        assert await closed_with(socket) == 4401
    key = gateway.stack.keys["alpha"]
    async with opened(gateway, None, path=f"/v1/stream?key={key}&api_key={key}") as socket:
        await ask(socket, "a")
        assert await closed_with(socket) == 4401


@pytest.mark.slow
async def test_a_silent_socket_is_closed(gateway: Gateway) -> None:
    async with opened(gateway, None) as socket:
        assert await closed_with(socket) == 4408


@pytest.mark.parametrize(
    "message",
    [
        *("", "{", "[]", '{"type":"dance"}', '{"type":"request","id":1}', b"\xff"),
        '{"type":"request","id":"%s","path":"/v1/chat/completions","body":{}}' % ("x" * 257),
        '{"type":"resume","id":"x","request":"r","from":-1}',
    ],
)
async def test_a_malformed_message_closes(socket: ClientConnection, message: str | bytes) -> None:
    await socket.send(message)
    assert await closed_with(socket) == 4400


async def test_a_message_over_the_limit_closes(socket: ClientConnection) -> None:
    await socket.send("x" * 5_000_000)
    assert await closed_with(socket) == 1009


async def test_pages_of_other_sites_are_refused(gateway: Gateway) -> None:
    async with opened(gateway, headers={"Origin": "https://evil.example"}) as socket:
        assert await closed_with(socket) == 4403
    async with opened(gateway, headers={"Origin": "http://localhost:8001"}) as socket:
        assert (await receive(socket))["type"] == "ready"


async def test_another_path_is_no_socket(gateway: Gateway) -> None:
    with pytest.raises(InvalidStatus):
        async with opened(gateway, path="/v1/nothing"):
            pass
