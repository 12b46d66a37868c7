"""How a request's body is read: within time, and away from the loop that others' streams run on."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.api import body
from gateway.errors import ApiError


async def trickle(pieces: list[bytes], pause_s: float) -> AsyncIterator[dict[str, Any]]:
    for index, piece in enumerate(pieces):
        await asyncio.sleep(pause_s)
        yield {"type": "http.request", "body": piece, "more_body": index + 1 < len(pieces)}


async def read(pieces: list[bytes], pause_s: float = 0.0, limit: int = 1 << 20, encoding: bytes = b"") -> bytes:
    headers = {b"content-encoding": encoding} if encoding else {}
    return await body.read_body(headers, trickle(pieces, pause_s).__anext__, limit)


async def test_who_goes_on_sending_has_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_TIMEOUT_S", 1.5)  # the first piece has no more, on a machine that may be busy
    assert len(await read([bytes(65_536)] * 8, 0.25)) == 8 * 65_536


async def test_who_trickles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_TIMEOUT_S", 0.3)
    with pytest.raises(ApiError) as refused:
        await read([b"x"] * 100, 0.1)
    assert refused.value.code == "request_timeout"


async def test_what_is_thrown_away_buys_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_TIMEOUT_S", 0.3)
    with pytest.raises(ApiError) as refused:
        await read([bytes(65_536)] * 15, 0.1, limit=65_536)
    assert refused.value.code == "request_timeout"


async def test_a_large_body_is_inflated_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    inflate = body._inflate

    def watched(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return inflate(*arguments)

    monkeypatch.setattr(body, "_inflate", watched)
    whole = bytes(range(256)) * 2000
    for size in (len(whole), 10):
        packed = gzip.compress(whole[:size], 0)
        assert await read([packed], encoding=b"gzip") == whole[:size]
    large, small = threads
    assert large is not threading.main_thread() and small is threading.main_thread()
