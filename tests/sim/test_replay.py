"""Recordings of simulated engines, played again; shadows."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.scheduler import POLICIES, Scheduler, SchedulerConfig, create
from engine.scheduler.contract import Accounts, Request
from engine.scheduler.step import Sample, StepOutcome, StepPlan
from engine.serve.recording import Recorded, Scribe
from engine.serve.shadow import Divergence, Shadow
from engine.sim.replay import main
from engine.sim.report import summary
from engine.sim.workload import Source, stream
from engine.sim.world import World

CONFIG = SchedulerConfig(device_blocks=90, host_blocks=64, max_rows=8, max_step_tokens=256, block_bytes=1000)
SOURCES = [
    Source("a", 0, 1.0, 25, prefix="system", shared=40),
    Source("b", 1, 1.0, 25, "gamma"),
    Source("c", 2, 1.0, 25, "backlog", prefix="system", shared=100),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One engine behind the queue: parks, prefix hits, charges."""
    path, scribe = tmp_path_factory.mktemp("recorded") / "engine.jsonl", Scribe()
    with path.open("wb") as file:

        def make(policy: str, config: SchedulerConfig) -> Scheduler:
            return Recorded(config, POLICIES[policy](), lambda event: file.write(scribe.line(event)))

        world = World(CONFIG, make=make).run(stream(SOURCES))
        file.write(scribe.line(("stop", "the test is over")))
    assert sum(life.parks for life in world.lives.values()) > 0
    return path


@pytest.fixture
def recording(recorded: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copy(recorded, tmp_path))


def test_a_recording_plays_identically(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recording)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(" plans, all as recorded; the recording ended because the test is over\n")
    assert int(out.split()[0]) > 100


@pytest.mark.slow
def test_other_policies_plan_on_the_same_views(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recording), "--policy", "fcfs", "--show", "1"]) == 0
    first, _, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step ") and "fcfs plans otherwise" in first
    assert last.startswith("fcfs differs in ") and int(last.split()[-1]) > 0
    assert main([str(recording), "--policy", "tiered"]) == 0
    assert capsys.readouterr().out.endswith("tiered differs in 0\n")
    assert main([str(recording), "--policy", "fcfs", "--policy", "deadline", "--show", "0"]) == 0
    assert "deadline differs from fcfs in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prefix", "old", "new"),
    [(b'["plan"', b'"length":', b'"length":1'), (b'["submit"', b'"tier":', b'"tier":9'), (b'["submit"', None, b"")],
)
def test_a_changed_recording_is_told(
    recording: Path, capsys: pytest.CaptureFixture[str], prefix: bytes, old: bytes | None, new: bytes
) -> None:
    lines = recording.read_bytes().splitlines(keepends=True)
    at = max(i for i, line in enumerate(lines) if line.startswith(prefix) and (old is None or old in line))
    lines[at] = new if old is None else lines[at].replace(old, new, 1)
    recording.write_bytes(b"".join(lines))
    assert main([str(recording)]) == 1
    out = capsys.readouterr().out
    assert "the plan is not the recorded one: " in out
    assert "the last is not the recorded one" in out


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [(-1, "cut off"), (-200, "can't be played"), (10, "line 1 can't be played"), (0, "cut off")],
)
def test_a_recording_that_was_cut_off_is_told(
    recording: Path, capsys: pytest.CaptureFixture[str], cut: int, sentence: str
) -> None:
    data = recording.read_bytes()
    lines = data.splitlines(keepends=True)
    recording.write_bytes(b"".join(lines[:-1]) if cut == -1 else data[:cut])
    assert main([str(recording)]) == 2
    assert sentence in capsys.readouterr().err


def test_what_is_no_recording_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('["calls", 7]\n')
    assert main([str(other)]) == 2
    assert "no recording" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2


def test_stand_ins_agree_as_far_as_two_sequences_begin_alike_and_say_nothing_else() -> None:
    scribe = Scribe()
    one = Request(1, 1, 0, "a", (5, 5, 7, 8), 9, 0.0, 1.0, 0.1, frozenset({2}), salt="s")
    first, second, third, other = (
        scribe._request(r)
        for r in (
            one,
            replace(one, sequence=2, prompt=(5, 5, 9, 8)),
            replace(one, sequence=3),
            replace(one, sequence=4, salt="t"),
        )
    )
    assert first.prompt[:2] == second.prompt[:2] and first.prompt == third.prompt
    assert len({*first.prompt, *second.prompt, *other.prompt}) == 4 + 2 + 4
    assert min(first.prompt) > 255 and "s" not in (first.salt, second.salt) and first.salt != other.salt
    scheduler = create("tiered", SchedulerConfig())
    scheduler.submit(one, 0.0)
    plan = scheduler.plan(0.0)
    for token in (6, 2):
        outcome = StepOutcome(plan.step, (Sample(1, (token,)),), 0.1)
        line = scribe.line(("commit", 0.1, outcome, scheduler.commit(plan, outcome, 0.1)))
        plan = scheduler.plan(0.1)
        assert (b'"tokens":[-1]' in line) is (token == 2)
    assert not scribe._hashes.get(1)


@pytest.mark.slow
def test_a_shadow_reports_differences_and_changes_nothing() -> None:
    found: list[Divergence] = []
    shadows: list[Shadow] = []

    class Shadowed(Scheduler):
        def plan(self, now: float, accounts: Accounts | None = None) -> StepPlan:
            plan = super().plan(now, accounts)
            shadows[0].look(plan, now)
            return plan

    def make(policy: str, config: SchedulerConfig) -> Scheduler:
        scheduler = Shadowed(config, POLICIES[policy]())
        shadows.append(Shadow(scheduler, ["fcfs", "tiered"], 5, 1.0, found.append, lambda: 0.0))
        return scheduler

    shadowed = World(CONFIG, make=make).run(stream(SOURCES))
    assert summary(shadowed) == summary(World(CONFIG).run(stream(SOURCES)))
    counts = shadows[0].counts
    assert counts["fcfs"]["differed"] == len(found) > 0
    assert counts["tiered"] == {"asked": counts["fcfs"]["asked"], "differed": 0, "cut": 0}


def test_a_shadow_stops_in_the_middle_of_a_plan_when_its_time_is_over() -> None:
    clock = iter(range(10_000))
    scheduler = create("tiered")
    for i in range(40):
        scheduler.submit(Request(i, i, 0, f"t{i}", (1, 2, 3), 9, 0.0, 1.0, 0.1), 0.0)
    shadow = Shadow(scheduler, ["fair", "fcfs"], 1, 30.0, lambda _: None, lambda: float(next(clock)))
    shadow.look(scheduler.plan(0.0), 0.0)
    assert [shadow.counts[name]["cut"] for name in ("fair", "fcfs")] == [1, 1]
    assert next(clock) < 40, "not much was asked after the cap"
