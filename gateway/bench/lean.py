"""A client that costs so little that what it measures is the server's: raw HTTP/1.1, events counted, never parsed.

It holds a number of streams open and stamps every token as its bytes arrive. It reads only chat streams with one token
in each event, which is what a paced engine sends, and says so when it gets anything else.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import orjson

from gateway.bench.client import Unreachable

__all__ = ["Front", "Stamps", "hold_idle", "hold_unread", "steady"]

_TOKEN = b'"content":"'
_DONE = b"[DONE]"
_END = b"0\r\n\r\n"
_OPENING = 32
"""Idle streams that are opened at a time."""


@dataclass(frozen=True, slots=True)
class Front:
    """A gateway, or the upstream itself: where it listens, what it wants to be told, and the processes that it is."""

    name: str
    base: str
    key: str = ""
    model: str = "paced"
    headers: tuple[tuple[str, str], ...] = ()
    pids: tuple[int, ...] = ()

    def request(self, prompt: str, tokens: int) -> bytes:
        """The bytes of one streamed chat request."""
        url = urlsplit(self.base)
        said = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        body = orjson.dumps({**said, "max_tokens": tokens, "stream": True, "ignore_eos": True})
        path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {url.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(slots=True)
class Stamps:
    """One request: when it was sent, when each token came, and what went wrong (empty: nothing so far)."""

    sent_s: float
    tokens_s: list[float] = field(default_factory=list)
    wrong: str = ""
    done: bool = False


class _Caller(asyncio.Protocol):
    """One kept-alive connection, one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self._stamps: Stamps | None = None
        self._expected = 0
        self._over: asyncio.Future[None] | None = None
        self._first: Callable[[], None] | None = None
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.open = cast("asyncio.Transport", transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._finish("the connection was closed")

    async def ask(self, request: bytes, tokens: int, stamps: Stamps, first: Callable[[], None] | None = None) -> None:
        """Until the answer's end, or until it goes wrong. `first` is called at the first token."""
        self._stamps, self._expected, self._first = stamps, tokens, first
        self._head = self._tail = b""
        self._over = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._over

    def leave(self) -> None:
        """Close the connection; that the answer didn't end is then nobody's fault."""
        self._stamps = None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        now, stamps = time.perf_counter(), self._stamps
        if stamps is None:
            return
        if not stamps.tokens_s and (data := self._after_head(data)) == b"":
            return
        data = self._tail + data
        stamps.tokens_s += [now] * data.count(_TOKEN)
        # Shorter than what is looked for, so that nothing is counted twice.
        self._tail = data[1 - len(_TOKEN) :]
        if self._first is not None and stamps.tokens_s:
            self._first()
            self._first = None
        if _DONE in data:
            stamps.done = True
        if stamps.done and data.endswith(_END):
            got = len(stamps.tokens_s)
            self._finish("" if got == self._expected else f"{got} tokens instead of {self._expected}")

    def _after_head(self, data: bytes) -> bytes:
        """What follows the response's head, once that is whole; a status other than 200 ends the request."""
        if self._head.endswith(b"\r\n\r\n"):
            return data
        whole = self._head + data
        end = whole.find(b"\r\n\r\n")
        self._head = whole if end < 0 else whole[: end + 4]
        if end < 0:
            return b""
        if whole[9:12] != b"200":
            self._finish(f"status {whole[9:12].decode('latin-1')}")
            self.transport.close()
            return b""
        return whole[end + 4 :]

    def _finish(self, wrong: str) -> None:
        if self._stamps is not None:
            self._stamps.wrong, self._stamps = wrong, None
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


async def _connect(front: Front) -> _Caller:
    url = urlsplit(front.base)
    loop = asyncio.get_running_loop()
    _, caller = await loop.create_connection(_Caller, url.hostname or "", url.port or 80)
    return caller


async def steady(
    front: Front, *, streams: int, prompt: str, tokens: int, until: float, spread_s: float, pause_s: float
) -> list[Stamps]:
    """`streams` streams at all times up to `until` (perf_counter), each a new one when it ends.

    The first ones begin evenly over `spread_s`, and a random pause before each (`pause_s` at most) keeps their
    beginnings from falling into step with the engine's.
    """
    found: list[Stamps] = []
    random_ = random.Random(streams)
    request = front.request(prompt, tokens)

    async def user(number: int) -> None:
        await asyncio.sleep(spread_s * number / streams)
        caller = await _connect(front)
        try:
            while time.perf_counter() < until:
                await asyncio.sleep(random_.random() * pause_s)
                if not caller.open:
                    caller = await _connect(front)
                stamps = Stamps(time.perf_counter())
                found.append(stamps)
                await caller.ask(request, tokens, stamps)
                if stamps.wrong:
                    await asyncio.sleep(0.2)
        finally:
            caller.leave()

    users = [asyncio.create_task(user(i)) for i in range(streams)]
    done, left = await asyncio.wait(users, timeout=max(0.0, until - time.perf_counter()))
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for task in done:
        task.result()
    return found


async def hold_idle(front: Front, count: int, wait_s: float = 120.0) -> Callable[[], None]:
    """Open `count` streams that say one token and then nothing. Returns what closes them.

    Raises Unreachable or TimeoutError.
    """
    request = front.request("pace 50 hold", 1000)
    opening = asyncio.Semaphore(_OPENING)
    callers: list[_Caller] = []
    tasks: list[asyncio.Task[None]] = []

    async def one() -> None:
        async with opening:
            caller = await _connect(front)
            callers.append(caller)
            begun = asyncio.Event()
            stamps = Stamps(time.perf_counter())
            task = asyncio.create_task(caller.ask(request, 1000, stamps, begun.set))
            tasks.append(task)
            started = asyncio.create_task(begun.wait())
            await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if stamps.wrong:
                raise Unreachable(f"{front.name}: an idle stream was not begun: {stamps.wrong}")

    def close() -> None:
        for caller in callers:
            caller.leave()
        for task in tasks:
            task.cancel()

    try:
        async with asyncio.timeout(wait_s), asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one())
    except BaseException as error:
        close()
        if isinstance(error, ExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return close


async def hold_unread(front: Front, count: int, prompt: str, tokens: int) -> Callable[[], None]:
    """Ask for `count` streams and never read them. Returns what closes them."""
    url = urlsplit(front.base)
    loop = asyncio.get_running_loop()
    request = front.request(prompt, tokens)
    sockets: list[socket.socket] = []
    for _ in range(count):
        sock = socket.socket()
        # As little as the kernel allows: the rest must wait in the server.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (url.hostname or "", url.port or 80))
        await loop.sock_sendall(sock, request)
        sockets.append(sock)

    def close() -> None:
        for sock in sockets:
            with suppress(OSError):
                sock.close()

    return close
