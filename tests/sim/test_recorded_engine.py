"""An engine that records and shadows, driven through HTTP; its recording played again by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.keys import Keys
from engine.protocol.messages import Heartbeat, decode
from engine.sim.replay import main
from tests.harness import ROOT, Gateway, Stack
from tests.serve.conftest import wait_for

SECRET = "my grandmother's maiden name is Featherstonehaugh"


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", "replay", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def lines(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ask(gateway: Gateway, tenant: str) -> str:
    body = {"model": "recorded", "max_tokens": 30, "messages": [{"role": "user", "content": SECRET}]}
    with gateway.client(tenant) as client:
        answer = client.post("chat/completions", json=body).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


def leave_early(gateway: Gateway) -> None:
    """A client that goes away after its first token."""
    body = {"model": "recorded", "max_tokens": 2000, "stream": True, "prompt": SECRET}
    with gateway.client() as client, client.stream("POST", "completions", json=body) as response:
        next(line for line in response.iter_lines() if line.startswith("data: "))


@pytest.mark.slow
def test_what_an_engine_did_for_http_clients_plays_again_the_same(
    stack: Stack, gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.jsonl"
    watching = {"record": str(path), "shadow": "fcfs,priority", "shadow_every": "2", "shadow_cap_ms": "1000"}
    engine = stack.engine("decode_tps=200,prefill_tps=4000,rows=2", "recorded", id="rec", policy="fair", **watching)
    with ThreadPoolExecutor(8) as pool:
        tenants = ["alpha", "alpha", "beta", "alpha", "alpha", "beta"]
        answers = [pool.submit(ask, gateway, tenant) for tenant in tenants]
        pool.submit(leave_early, gateway).result()
        assert all(answer.result() for answer in answers)
    counts = shadows(stack)
    assert engine.stop() == 0

    recorded = lines(path)
    assert [line[0] for line in recorded].count("submit") == 7
    assert {"end", "commit", "told", "stop"} <= {line[0] for line in recorded}
    assert "Feather" not in path.read_text() and hidden(recorded)
    differ = [line[1] for line in recorded if line[0] == "differs"]
    assert len(differ) >= counts["fcfs"]["differed"] + counts["priority"]["differed"]
    assert counts["fcfs"]["asked"] > 10 and counts["fcfs"]["cut"] == 0

    played = replay(str(path))  # the command; below the same in this process
    assert (played.returncode, played.stderr) == (0, "")
    assert "all as recorded; the recording ended because the engine stopped with status 0" in played.stdout
    assert main([str(path), "--policy", "fcfs", "--policy", "priority"]) == 0
    assert "priority differs from fcfs in " in capsys.readouterr().out
    spoil(path, recorded)
    assert main([str(path)]) == 1
    assert "the plan is not the recorded one" in capsys.readouterr().out
    path.write_text("".join(json.dumps(line) + "\n" for line in recorded)[:-40])
    assert main([str(path)]) == 2
    assert "can't be played" in capsys.readouterr().err


def shadows(stack: Stack) -> dict[str, dict[str, int]]:
    """From a heartbeat that has seen all of the run."""
    key, found = Keys(stack.prefix).engine("rec"), []

    def steady() -> bool:
        raw: Any = stack.redis.get(key)
        found.append(decode(raw, Heartbeat))
        return found[-1].steps > 0 and found[-1].running == 0

    wait_for(steady, 10)
    return dict(found[-1].shadow)


def hidden(recorded: Sequence[list[Any]]) -> bool:
    """Token ids of the simulated backend are below 300; the recording has none of them."""
    prompts = [token for line in recorded if line[0] == "submit" for token in line[2]["prompt"]]
    outputs = [t for line in recorded if line[0] == "commit" for sample in line[2]["samples"] for t in sample["tokens"]]
    return len(prompts) > 100 and len(outputs) > 100 and min(prompts) > 300 and min({*outputs} - {-1}) > 300


def spoil(path: Path, recorded: list[list[Any]]) -> None:
    """Take a request out."""
    at = next(i for i, line in enumerate(recorded) if line[0] == "submit")
    path.write_text("".join(json.dumps(line) + "\n" for i, line in enumerate(recorded) if i != at))
