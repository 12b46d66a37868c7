"""`sluice bench compare` as a user runs it, over a small program that stands for llama.cpp's server."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.bench import journal
from gateway.bench.cli import app
from tests.load.test_bench_server import read_pid

SERVER = """#!{python}
import http.server, os, pathlib, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        mood = pathlib.Path({mood!r})
        self.rfile.read(int(self.headers["Content-Length"]))
        if (said := mood.read_text()) == "die":
            os._exit(3)
        self.send_response(500 if said == "fail" else 200)
        self.end_headers()
        if said == "hang":
            mood.with_name("pid").write_text(f"{{os.getpid()}} ")
            time.sleep(600)
        usage = '{{"choices": [], "usage": {{"prompt_tokens": 3, "completion_tokens": 2}}}}'
        for event in ('{{"choices": [{{"delta": {{"content": "a b"}}}}]}}', usage):
            self.wfile.write(b"data: " + event.encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *words):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Bench:
    """A folder with the program in it, and the command over it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.mood = folder, folder / "mood"
        self.mood.write_text("well")
        program = folder / "llama" / "bin" / "llama-server"
        program.parent.mkdir(parents=True)
        program.write_text(SERVER.format(python=sys.executable, mood=str(self.mood)))
        program.chmod(0o755)
        (folder / "m.gguf").touch()
        self.found = folder / "found.json"
        self.arguments = [
            *("compare", "--with", "llama", "--pairs", "1", "--levels", "1x4,2x4", "--warmup", "1"),
            *("--dataset", "words:4", "--max-tokens", "2", "--model", str(folder / "m.gguf"), "--port", str(port)),
            *("--work", str(folder / "work"), "--peers", str(folder), "--json", str(self.found)),
        ]

    def run(self, mood: str) -> str:
        self.mood.write_text(mood)
        return CliRunner().invoke(app, self.arguments, catch_exceptions=False).output

    def rounds(self) -> list[Any]:
        """What the first round found, level by level."""
        return [level["runs"]["llama"][0] for level in json.loads(self.found.read_bytes())["levels"]]


@pytest.fixture
def bench(tmp_path: Path, unused_tcp_port: int) -> Bench:
    return Bench(tmp_path, unused_tcp_port)


def test_a_rerun_goes_on_and_a_changed_source_starts_anew(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "engine" / "deep" / "x.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1")
    monkeypatch.setattr(journal, "SOURCES", (tmp_path / "engine",))
    assert "starting llama" in bench.run("well") and all(bench.rounds())
    assert "starting llama" not in bench.run("well") and all(bench.rounds())
    (source.parent / "notes.txt").write_text("no source")
    assert "starting llama" not in bench.run("well")
    source.write_text("a = 2")
    assert "starting llama" in bench.run("fail") and not any(bench.rounds())
    source.write_text("a = 1")
    assert "starting llama" not in bench.run("fail") and all(bench.rounds())


@pytest.mark.parametrize(
    ("mood", "said"), [("die", "ended with status 3 while it was used"), ("fail", "no warm-up request succeeded")]
)
def test_a_server_that_fails_is_told_and_measured_by_the_rerun(mood: str, said: str, bench: Bench) -> None:
    assert said in bench.run(mood).replace("\n", " ") and not any(bench.rounds())
    bench.run("well")
    assert all(bench.rounds())


def test_a_log_shows_how_far_a_level_is(bench: Bench) -> None:
    said = bench.run("well")
    assert "llama, 1 at a time: 1 of 4" in said and "llama, 2 at a time: 3 of 4" in said


def test_a_run_in_which_requests_failed_is_measured_again(bench: Bench) -> None:
    bench.run("well")
    kept = bench.folder / "work" / "compare.jsonl"
    kept.write_text(kept.read_text().replace('"ok":4', '"ok":3', 1))
    assert "starting llama" in bench.run("well") and all(bench.rounds())
    assert len(kept.read_text().splitlines()) == 3, "the other level's run was whole"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_told_to_stop_it_shows_what_there_is_and_leaves_nothing_running(
    number: signal.Signals, bench: Bench
) -> None:
    bench.mood.write_text("hang")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.bench", *bench.arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    watch = await asyncio.to_thread(read_pid, bench.folder / "pid")
    process.send_signal(number)
    said = (await asyncio.wait_for(process.communicate(), 60))[0].decode()
    assert "stopping" in said and "| 1 | llama |" in said and "Traceback" not in said
    assert select.select([watch], [], [], 0)[0]
    assert bench.rounds() == [None, None]


def test_too_few_prompts_are_told_before_anything_starts(bench: Bench) -> None:
    bench.arguments += ["--dataset", "words:2000"]
    said = " ".join(bench.run("well").replace("│", " ").split())
    assert "0 prompts of at most 3584 bytes" in said and "starting" not in said
