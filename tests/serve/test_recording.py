"""The file an engine records to: bounded, kept apart from an older one, harmless when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.scheduler.contract import Request
from engine.serve.log import Log
from engine.serve.options import parse
from engine.serve.recording import Tape


def test_a_recording_ends_at_its_size_and_keeps_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text("older")
    with (tmp_path / "log").open("w+") as stream:
        tape = Tape(path, 2000, Log(stream=stream))
        tape.start()
        for i in range(100):
            tape.tell(("submit", 0.0, Request(i, i, 0, "t", (1, 2, 3), 9, 0.0, 1.0, 0.1)))
        tape.join(10)
        tape.tell(("told",))
        stream.seek(0)
        assert "recording_ended" in stream.read()
    assert json.loads(path.read_bytes().splitlines()[-1]) == ["stop", "it reached 0 MiB"]
    assert 1500 < path.stat().st_size < 2100 and path.stat().st_mode & 0o777 == 0o600
    assert Path(f"{path}.1").read_text() == "older"


def test_a_recording_that_cannot_be_written_says_so_and_harms_nobody(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as stream:
        tape = Tape(tmp_path / "x.jsonl", 1 << 20, Log(stream=stream))
        tape._file.close()
        tape._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 (the tape closes it)
        tape.start()
        tape.tell(("told",))
        tape.join(10)
        tape.tell(("told",))
        stream.seek(0)
        assert "recording_failed" in stream.read()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--shadow", "fcfs,best"), "unknown policy best"),
        (("--shadow-every", "0"), "must be more than 0"),
        (("--record-mib", "-1"), "must be more than 0"),
    ],
)
def test_wrong_options_are_told(arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["--pool", "p", "--backend", "simulated", "--redis-url", "redis://x", *arguments])
    assert sentence in capsys.readouterr().err
