"""The simulator through its command line and its worlds; recordings and shadows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import SchedulerConfig
from engine.sim.__main__ import main
from engine.sim.report import jain, percentile, plot, summary
from engine.sim.workload import ARRIVALS, LENGTHS, Arrival, Source, read_trace, stream
from engine.sim.world import COSTS, World

CONFIG = SchedulerConfig(device_blocks=256, host_blocks=64, max_rows=8, max_step_tokens=256, block_bytes=1000)
SOURCES = [Source("a", 0, 1.0, 25), Source("b", 1, 1.0, 25, "gamma"), Source("c", 2, 1.0, 25, "backlog")]


def test_scheduler_kv_and_sim_import_without_torch_redis_or_numpy() -> None:
    code = (
        "import sys, engine.sim.__main__, engine.sim.replay;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'redis', 'numpy', 'django')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("front", [True, False])
def test_everything_that_arrives_is_served_exactly_once(front: bool) -> None:
    world = World(CONFIG, engines=2, front=front).run(stream(SOURCES))
    assert len(world.lives) == 75
    assert all(life.done and life.tokens == life.arrival.output for life in world.lives.values())
    for engine in world.fleet:
        engine.scheduler.check()
        assert not engine.scheduler.running and not engine.scheduler.parked


def test_the_same_seed_gives_the_same_report() -> None:
    first, second = (summary(World(CONFIG, engines=2).run(stream(SOURCES, 7))) for _ in range(2))
    assert first == second
    assert first != summary(World(CONFIG, engines=2).run(stream(SOURCES, 8)))


def test_the_command_line_reports_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ttft.svg"
    arguments = ["run", "--requests", "30", "--rate", "5", "--lengths", "short", "--plot", str(picture)]
    assert main(arguments) == 0
    assert "interactive" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 30


def test_a_trace_file_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt,output,tier,tenant\n0,20,5,0,x\n0.5,30,6,2,y\n")
    assert list(read_trace(trace))[1] == Arrival(0.5, 2, "y", 30, 6)
    assert main(["run", "--trace", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2
    trace.write_text("at_s,prompt\n0,many\n")
    assert main(["run", "--trace", str(trace)]) == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(ARRIVALS))
def test_gaps_have_the_mean_they_promise(name: str) -> None:
    rng = Random(1)
    mean = sum(ARRIVALS[name](rng) for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(0.0 if name == "backlog" else 1.0, rel=0.25)


def test_sharegpt_like_lengths_have_the_published_means() -> None:
    rng = Random(1)
    prompt, output = LENGTHS["sharegpt"]
    assert sum(prompt(rng) for _ in range(20_000)) / 20_000 == pytest.approx(161, rel=0.1)
    assert sum(output(rng) for _ in range(20_000)) / 20_000 == pytest.approx(338, rel=0.1)


def test_figures() -> None:
    assert percentile([], 0.5) is None
    assert percentile(range(100), 0.99) == 99
    assert jain([1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0]) == 0.5
    assert "polyline" in plot("t", {"a": [(0.0, 1.0), (1.0, 2.0)]}, "x", "y")


def test_an_engine_learns_the_cost_of_a_machine_it_was_not_told_of() -> None:
    world = World(CONFIG, truth=COSTS["gpu"]).run(stream([replace(s, count=40) for s in SOURCES]))
    cost = world.fleet[0].scheduler.cost
    assert cost.prefill_seconds(200) == pytest.approx(200 * COSTS["gpu"][1], rel=0.3)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    engines=st.integers(1, 3),
    blocks=st.integers(70, 200),
    rows=st.integers(1, 20),
    host=st.sampled_from([0, 100]),
    traffic=st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from("abc"), st.sampled_from(sorted(ARRIVALS)), st.floats(0.5, 20.0),
            st.sampled_from([0.5, 1.0, 4.0]),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda t: t[:2],
    ),
)  # fmt: skip
def test_any_traffic_on_any_number_of_engines_is_served_and_leaves_nothing_behind(
    engines: int, blocks: int, rows: int, host: int, traffic: list[tuple[int, str, str, float, float]]
) -> None:
    sources = [Source(name, tier, rate, 12, kind, "exponential", weight) for tier, name, kind, rate, weight in traffic]
    config = replace(CONFIG, device_blocks=blocks, max_rows=rows, host_blocks=host, express_rows=-1)
    world = World(config, engines=engines).run(stream(sources))
    assert all(life.done and life.tokens == life.arrival.output for life in world.lives.values())
    assert not world.queue.active and not world.queue.rows
    for engine in world.fleet:
        engine.scheduler.check()
        assert engine.scheduler.device.live == 0


def test_behind_the_queue_an_overload_leaves_the_goodput_standing() -> None:
    def met(load: float) -> float:
        sources = [Source(f"t{i}", 0, 2.0 * load, int(60 * load), "poisson", "100/40") for i in range(4)]
        config = SchedulerConfig(device_blocks=2048, max_rows=16, prefix_cache=False)
        world = World(config).run(stream(sources), until_s=30.0)
        return sum(life.met for life in world.lives.values()) / 30.0

    assert met(3.0) >= 0.9 * max(met(0.75), met(1.0))
