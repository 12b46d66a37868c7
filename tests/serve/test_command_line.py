"""What the command line refuses, and that it says so in a sentence."""

from __future__ import annotations

import re

import pytest

from engine.serve.options import parse
from tests.serve.conftest import StartEngine

GOOD = ["--pool", "demo", "--backend", "simulated", "--redis-url", "redis://localhost"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pool", "demo", "--redis-url", "redis://localhost"], "needs --model"),
        (["--pool", "demo", "--backend", "simulated"], "no Redis address"),
        ([*GOOD, "--lease-ms", "100"], "at least 500"),
        ([*GOOD, "--threads", "-1"], "can't be negative"),
        ([*GOOD, "--policy", "luck"], "fcfs"),
        (GOOD[2:], "--pool"),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert sentence in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_the_environment_names_redis_and_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("SLUICE_REDIS_PREFIX", "mine:")
    options = parse(["--pool", "demo", "--backend", "simulated"])
    assert (options.redis_url, options.prefix, options.model_name) == ("redis://elsewhere", "mine:", "demo")
    assert options.threads >= 1


def test_what_can_not_start_says_why(start: StartEngine) -> None:
    for arguments, sentence in (
        (("--simulate", "speed=1"), "speed=1"),
        (("--redis-url", "http://nowhere"), "Redis URL must"),
    ):
        engine = start("e1", *arguments, ready=False)
        assert engine.wait() == 1
        [line] = [line for line in engine.log if line["event"] == "not_started"]
        assert sentence in line["detail"]
