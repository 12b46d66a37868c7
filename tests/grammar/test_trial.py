"""G3: a grammar that is too much ends the process it is tried in, and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.protocol.messages import ModelCard
from engine.text.grammar import Trial, TrialError

OBJECT = json.dumps({"kind": "json_object"})
HUGE = json.dumps({"kind": "json_schema", "schema": {"enum": [f"{i}" * 12 for i in range(300_000)]}})


@pytest.fixture(scope="module")
def trial(byte_card: ModelCard) -> Iterator[Trial]:
    made = Trial(byte_card, cpu_seconds=1)
    yield made
    made.close()


def test_a_sound_constraint_has_no_refusal(trial: Trial) -> None:
    assert trial.refusal(OBJECT) is None


def test_a_faulty_one_has_its_reason(trial: Trial) -> None:
    assert "uniqueItems" in (trial.refusal('{"kind": "json_schema", "schema": {"uniqueItems": true}}') or "")


def test_nothing_satisfies(trial: Trial) -> None:
    assert trial.refusal('{"kind": "regex", "regex": "[^\\\\x00-\\\\U0010FFFF]"}') == "nothing satisfies it"


def test_too_much_time_is_refused_and_the_next_is_tried(trial: Trial) -> None:
    assert "more than 1 s" in (trial.refusal(HUGE) or "")
    assert trial.refusal(OBJECT) is None


def test_too_much_memory_is_refused(byte_card: ModelCard) -> None:
    trial = Trial(byte_card, cpu_seconds=60, memory_bytes=8 << 20)
    try:
        assert "8 MiB" in (trial.refusal(HUGE) or "")
        assert trial.refusal(OBJECT) is None
    finally:
        trial.close()


def test_its_process_holds_no_secrets_and_goes_when_closed(byte_card: ModelCard) -> None:
    trial = Trial(byte_card)
    assert trial.refusal(OBJECT) is None
    child = trial._child
    assert child is not None
    environment = Path(f"/proc/{child.pid}/environ").read_bytes()
    assert os.environ["SLUICE_KEY_PEPPER"].encode() not in environment and b"DATABASE_URL" not in environment
    trial.close()
    assert child.poll() is not None


def test_closing_ends_a_trial_under_way(byte_card: ModelCard) -> None:
    trial = Trial(byte_card, cpu_seconds=60, memory_bytes=4 << 30)
    assert trial.refusal(OBJECT) is None
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(trial.refusal, HUGE.replace("json_schema", "json_schema"))
        while trial._lock.acquire(blocking=False):  # until the other thread has it
            trial._lock.release()
        trial.close()
        try:
            waiting.result(10)
        except TrialError:
            pass
        assert time.monotonic() - began < 10


def test_no_process_is_not_the_grammars_fault(byte_card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(TrialError):
        Trial(byte_card).refusal(OBJECT)
