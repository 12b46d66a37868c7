"""The paced engine keeps its times, and the lean client tells them: over HTTP, with nothing between."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from engine.paced.http import HttpFace
from engine.paced.pace import Agenda, Pace, Stream
from gateway.bench.client import Unreachable
from gateway.bench.lean import Front, hold_idle, steady
from gateway.bench.overhead import Idle, Plan, compare, idle_memory
from gateway.bench.overhead_show import as_markdown, rows, to_dict


@pytest.fixture
async def upstream() -> AsyncIterator[str]:
    server = await HttpFace().serve("127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def test_a_prompt_says_its_pace() -> None:
    assert Pace.of("please pace 80 10, thank you") == Pace(0.08, 0.1)
    assert Pace.of("pace 80 hold") == Pace(0.08, None)
    assert Pace.of("hello") == Pace()


def test_the_first_token_is_due_alone_and_the_others_with_everybody() -> None:
    pace = Pace(0.05, 0.1)
    assert pace.due(1.23, 0) == pytest.approx(1.28)
    assert [pace.due(1.23, i) for i in (1, 2)] == pytest.approx([1.4, 1.5])
    assert pace.due(1.2501, 1) - pace.due(1.25, 1) == pytest.approx(
        0.1
    )  # due at 1.3: at the beginning of a step, not after it
    assert Pace(0.05, None).due(1.0, 1) == math.inf


def test_an_agenda_gives_each_token_once_and_forgets_who_is_gone() -> None:
    agenda = Agenda()
    streams = [Stream(Pace(0.05, 0.1), 1.0, 2, name) for name in "ab"]
    for stream in streams:
        agenda.add(stream)
    assert agenda.next == pytest.approx(1.05)
    assert agenda.take(1.0) == []
    assert [s.owner for s in agenda.take(1.1)] == ["a", "b"]
    streams[0].gone = True
    assert [s.owner for s in agenda.take(9.0)] == ["b"]
    assert streams[1].done and agenda.next == math.inf


def test_a_stream_that_is_behind_has_its_tokens_one_by_one() -> None:
    agenda = Agenda()
    agenda.add(Stream(Pace(0.05, 0.1), 1.0, 3, "late"))
    said = []
    while due := agenda.take(9.0):
        said.append([s.made for s in due])
    assert said == [[1], [2], [3]]


async def test_the_client_stamps_every_token_and_none_before_it_was_due(upstream: str) -> None:
    front = Front("direct", upstream)
    until = time.perf_counter() + 1.0
    found = await steady(front, streams=4, prompt="pace 30 50", tokens=5, until=until, spread_s=0.1, pause_s=0.01)
    whole = [s for s in found if s.done]
    assert len(whole) >= 4 and not any(s.wrong for s in found)
    assert all(len(s.tokens_s) == 5 and s.tokens_s[0] - s.sent_s >= 0.0295 for s in whole)
    # From the second token on a gap is a step, however late each may have been read: together they can't be shorter.
    assert all(s.tokens_s[-1] - s.sent_s >= 0.03 + 3 * 0.02 for s in whole)
    assert all(b >= a for s in whole for a, b in pairwise(s.tokens_s))


async def test_a_refused_request_is_told(upstream: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    until = time.perf_counter() + 0.1
    found = await steady(
        Front("full", base), streams=1, prompt="pace 1 9", tokens=1, until=until, spread_s=0, pause_s=0
    )
    assert {s.wrong for s in found if s.wrong} == {"status 429"}
    with pytest.raises(Unreachable, match="status 429"):
        await hold_idle(Front("full", base), 1)
    server.close()


async def test_idle_streams_are_open_and_silent_until_they_are_closed(upstream: str) -> None:
    found = await idle_memory(Front("direct", upstream, pids=(os.getpid(),)), 3, settle_s=0.01)
    assert found.streams == 3 and found.with_mib >= found.before_mib > 0
    assert Idle("a", 4, 10.0, 11.0).kib_per_stream == 256.0


async def test_fronts_are_compared_in_turn_and_told_in_one_table(upstream: str) -> None:
    said: list[str] = []
    fronts = [Front("one", upstream), Front("two", upstream, pids=(os.getpid(),))]
    found = await compare(Plan([9], 2, 0.2, warm_s=0.1), fronts, asyncio.Event(), said.append)
    assert [line.rpartition(" ")[2] for line in said] == ["one", "two", "two", "one"]
    one, two = rows(found.runs, found.idle)
    assert one["front"] == "one" and one["requests"] > 0 and one["wrong"] == 0 and one["events_per_core"] is None
    assert one["ttft_p50_ms"] > -0.5 and one["gap_p50_ms"] is not None
    assert two["events_per_core"] > 0
    assert as_markdown(found).count("\n") == 4
    assert len(to_dict(found)["runs"]) == 4
