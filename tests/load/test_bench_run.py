"""Whole runs against a small real HTTP server with known timings: it stands for any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from gateway.bench import Ask, Prompt, Report, Slo, Target, run_closed, run_open
from gateway.bench.client import Unreachable, find_model

FIRST_S, GAP_S, STALL_S = 0.03, 0.005, 0.12
KEYS = (("quiet", "sk-one"), ("loud", "sk-two"))


class Server:
    """Behaves as the model's name says. `crowd`: answer only when that many requests are there at the same time."""

    def __init__(self) -> None:
        self.url = ""
        self.crowd = 0
        self.crowded = asyncio.Event()
        self.open = self.most_open = 0
        self.bodies: list[dict[str, Any]] = []
        self.keys: Counter[str] = Counter()
        self.hanging = asyncio.Semaphore(0)
        self.left = asyncio.Semaphore(0)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "steady"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys[request.headers.get("Authorization", "")] += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if self.crowd:
                if self.open >= self.crowd:
                    self.crowded.set()
                await asyncio.wait_for(self.crowded.wait(), 30)
            return await self.answer(request, body)
        finally:
            self.open -= 1

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = body["model"]
        if kind == "refuse" and len(self.bodies) % 3 == 0:
            return web.json_response({"error": {"message": "slow down", "code": "rate_limited"}}, status=429)
        if kind == "broken":
            return web.Response(text="Traceback", status=500)
        if kind == "denied":
            return web.json_response({"error": {"message": "who?", "code": "invalid_api_key"}}, status=401)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.stream(response, body)
        return response

    async def stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        kind, tokens = body["model"], body["max_tokens"]
        await self.say(response, {"role": "assistant", "content": ""})
        await asyncio.sleep(FIRST_S)
        for i in range(tokens):
            if i:
                await asyncio.sleep(STALL_S if i == tokens // 2 else GAP_S)
            if i == 2 and kind == "cut":
                return
            if i == 2 and kind == "lost":
                await response.write(b'data: {"error": {"code": "engine_lost"}}\n\n')
                return
            if i == 2 and kind == "hang":
                await self.hang(response)
            await self.say(response, {"content": f" w{i}"})
        await response.write(b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}\n\n')
        if kind != "no-usage":
            usage = {"prompt_tokens": 11, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 3}}
            await response.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")

    async def hang(self, response: web.StreamResponse) -> None:
        self.hanging.release()
        try:
            while True:
                await asyncio.sleep(0.01)
                await response.write(b": still here\n\n")
        except OSError:
            self.left.release()
            raise

    async def say(self, response: web.StreamResponse, delta: dict[str, str]) -> None:
        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1)
    await site.start()
    server.url = runner.addresses[0][0] and f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"number {i}", 8) for i in range(count)]


async def test_timings_of_a_known_server(server: Server) -> None:
    report = await run_closed(Target(server.url, model="steady"), prompts(3), concurrency=1, ask=Ask(8))
    assert [t.ending for t in report.traces] == ["ok"] * 3
    for t in report.traces:
        assert t.ttft_s is not None and t.ttft_s >= FIRST_S, "the role-only chunk before it is no first token"
        assert t.stall_s is not None and t.stall_s >= STALL_S / 2, "nothing shorter than the server's pause"
        assert t.total_s >= FIRST_S + 6 * GAP_S + STALL_S
        assert t.sent_s == pytest.approx(t.scheduled_s, abs=0.05)
        assert t.text == " w0 w1 w2 w3 w4 w5 w6 w7"
        assert (t.finish, t.output_tokens, t.prompt_tokens, t.cached_tokens) == ("length", 8, 11, 3)
    s = report.summary(Slo(ttft_ms=60_000, stall_ms=1))
    assert s.goodput == 0.0, "every reply stalled for longer than a millisecond"
    assert s.counted_by == "usage"
    assert (s.output_tokens, s.prompt_tokens) == (24, 33)


async def test_closed_loop_holds_exactly_its_concurrency(server: Server) -> None:
    server.crowd = 5
    report = await run_closed(Target(server.url, model="steady"), prompts(13), concurrency=5, ask=Ask(2))
    assert server.most_open == 5
    assert sorted(t.index for t in report.traces) == list(range(13))
    assert len({b["messages"][0]["content"] for b in server.bodies}) == 13


async def test_open_loop_sends_whether_or_not_replies_come(server: Server) -> None:
    server.crowd = 12
    report = await run_open(Target(server.url, model="steady"), prompts(12), rate=200.0, burstiness=0.5, ask=Ask(2))
    assert report.summary().ok == 12, "the server answered nobody before all twelve were there"
    assert max(t.scheduled_s for t in report.traces) == pytest.approx(12 / 200)
    assert all(t.sent_s >= t.scheduled_s for t in report.traces)
    first = min(report.traces, key=lambda t: t.scheduled_s)
    assert first.ttft_s is not None and first.ttft_s >= 12 / 200 - first.scheduled_s, "its wait is in its TTFT"


async def test_tenants_take_turns_with_their_own_keys(server: Server) -> None:
    report = await run_closed(Target(server.url, KEYS, "steady"), prompts(6), concurrency=2, ask=Ask(1))
    assert server.keys == {"Bearer sk-one": 3, "Bearer sk-two": 3}
    assert report.tenants() == ["loud", "quiet"]
    assert report.only("quiet").summary().offered == 3


async def test_without_usage_chunks_are_counted_and_said_so(server: Server) -> None:
    report = await run_closed(Target(server.url, model="no-usage"), prompts(1), concurrency=1, ask=Ask(4))
    s = report.summary()
    assert (s.counted_by, s.output_tokens, s.prompt_tokens, s.total_per_s) == ("chunks", 4, None, None)


@pytest.mark.parametrize(
    ("model", "endings", "errors"),
    [
        ("refuse", {"ok": 4, "refused": 2}, {"429 rate_limited": 2}),
        ("cut", {"failed": 6}, {"200 no_done": 6}),
        ("lost", {"failed": 6}, {"200 engine_lost": 6}),
        ("broken", {"failed": 6}, {"500 Traceback": 6}),
    ],
)
async def test_what_goes_wrong_is_told_apart(
    server: Server, model: str, endings: dict[str, int], errors: dict[str, int]
) -> None:
    report = await run_closed(Target(server.url, model=model), prompts(6), concurrency=1, ask=Ask(4))
    assert Counter(t.ending for t in report.traces) == endings
    s = report.summary(Slo(ttft_ms=60_000))
    assert s.errors == errors
    assert s.goodput == pytest.approx(endings.get("ok", 0) / 6)


async def test_a_server_that_is_not_there_fails_every_request(unused_tcp_port: int) -> None:
    target = Target(f"http://127.0.0.1:{unused_tcp_port}", model="steady")
    report = await run_closed(target, prompts(2), concurrency=2)
    assert [t.ending for t in report.traces] == ["failed", "failed"]
    with pytest.raises(Unreachable, match="can't reach"):
        await find_model(target)


async def test_a_request_past_its_time_is_abandoned(server: Server) -> None:
    report = await run_closed(Target(server.url, model="hang"), prompts(1), concurrency=1, ask=Ask(4, timeout_s=0.5))
    assert [(t.ending, t.code) for t in report.traces] == [("abandoned", "timeout")]
    await asyncio.wait_for(server.left.acquire(), 10)


async def test_stop_keeps_what_was_measured_and_lets_go_of_the_server(server: Server) -> None:
    stop = asyncio.Event()
    work = asyncio.create_task(_stopped_run(server, stop))
    for _ in range(3):
        await asyncio.wait_for(server.hanging.acquire(), 10)
    stop.set()
    report = await asyncio.wait_for(work, 10)
    assert report.interrupted
    assert [(t.ending, t.code, len(t.chunks_s)) for t in report.traces] == [("abandoned", "stopped", 2)] * 3
    for _ in range(3):
        await asyncio.wait_for(server.left.acquire(), 10)


async def _stopped_run(server: Server, stop: asyncio.Event) -> Report:
    return await run_closed(Target(server.url, model="hang"), prompts(9), concurrency=3, ask=Ask(4), stop=stop)


async def bench(*arguments: str) -> asyncio.subprocess.Process:
    """The subcommand as a user runs it, in a process of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli", "bench", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=os.environ | {"COLUMNS": "140"},
    )  # fmt: skip


async def test_serve_prints_and_writes_every_level(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    load = ["--concurrency", "1,3", "--rate", "100", "--requests", "6", "--max-tokens", "4", "--dataset", "words:9"]
    keys = ["--key", "quiet=sk-one", "--key", "loud=sk-two"]
    process = await bench("serve", "--base", server.url, *keys, *load, "--slo", "ttft=60s", "--json", str(out))
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    for expected in ("steady", "1 at a time", "3 at a time", "100/s", "6 / 6", "100.0%", "counted by: usage", "quiet"):
        assert expected in said
    assert "sk-one" not in said + out.read_text()
    found = orjson.loads(out.read_bytes())
    assert [run["summary"]["ok"] for run in found["runs"]] == [6, 6, 6]
    assert found["tenants"] == ["quiet", "loud"]
    asked = [b["messages"][0]["content"] for b in server.bodies]
    assert len(asked) == len(set(asked)) == 4 + 18, "warm-up and runs share no prompt"
    assert all(b["ignore_eos"] and b["max_tokens"] == 4 for b in server.bodies)


async def test_ctrl_c_prints_what_was_measured(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    load = ["--model", "hang", "--concurrency", "2", "--requests", "8", "--dataset", "words:5", "--warmup", "0"]
    process = await bench("serve", "--base", server.url, *load, "--json", str(out))
    for _ in range(2):
        await asyncio.wait_for(server.hanging.acquire(), 30)
    process.send_signal(signal.SIGINT)
    said = (await process.communicate())[0].decode()
    assert "0 / 2" in said
    assert "(stopped)" in said
    run = orjson.loads(out.read_bytes())["runs"][0]
    assert (run["interrupted"], run["summary"]["abandoned"]) == (True, 2)
    assert process.returncode == 1, "no request succeeded"


async def test_ctrl_c_while_warming_up_says_that_nothing_was_measured(server: Server) -> None:
    process = await bench("serve", "--base", server.url, "--model", "hang")
    await asyncio.wait_for(server.hanging.acquire(), 30)
    process.send_signal(signal.SIGINT)
    said = (await process.communicate())[0].decode()
    assert "nothing was measured" in said
    assert process.returncode == 1


async def test_ab_prints_paired_ratios(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "ab.json"
    load = ["--pairs", "3", "--concurrency", "2", "--requests", "4", "--max-tokens", "3", "--dataset", "words:9"]
    process = await bench(
        "ab", "--base", f"new={server.url}", "--base", f"old={server.url}/v1", *load, "--json", str(out)
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert "new / old" in said
    found = orjson.loads(out.read_bytes())
    assert len(found["pairs"]) == 3
    by_name = {row["name"]: row for row in found["ratios"]}
    assert by_name["output tok/s"]["low"] <= by_name["output tok/s"]["ratio"] <= by_name["output tok/s"]["high"]
    asked = [b["messages"][0]["content"] for b in server.bodies]
    assert len(set(asked)) == len(asked), "both sides may share one engine: no side finds the other's prompts cached"
    tails = Counter(re.sub(r"^\S+( \w+){3}\. ", "", text) for text in asked)
    assert sorted(tails.values(), reverse=True)[:4] == [8, 8, 8, 8], "the same texts on both sides and at the warm-up"


async def test_a_refused_key_is_told_at_once(server: Server) -> None:
    process = await bench("serve", "--base", server.url, "--model", "denied")
    said = (await process.communicate())[0].decode()
    assert process.returncode == 2
    assert "invalid_api_key" in said
    assert len(server.bodies) == 4, "only the warm-up was sent"


@pytest.mark.parametrize("wrong", [["--slo", "fast"], ["--concurrency", "0"], ["--rate", "x"], ["--prefix", "4"]])
async def test_wrong_options_are_usage_errors(wrong: list[str]) -> None:
    process = await bench("serve", "--base", "http://127.0.0.1:9", *wrong)
    said = (await process.communicate())[0].decode()
    assert process.returncode == 2
    assert "Traceback" not in said
    assert "Invalid value" in said
