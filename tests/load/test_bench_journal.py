"""What is kept of long comparisons, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.bench import compare, run_rows
from gateway.bench.cli import app
from gateway.bench.client import Ask, Target, Unreachable
from gateway.bench.compare import Level, Plan
from gateway.bench.journal import Journal
from gateway.bench.kl import make_text, parse
from gateway.bench.quotients import quotients
from gateway.bench.rows import ROWS, Quotient, Row, Run, same_text
from gateway.bench.stacks import Stack


def test_a_rerun_finds_finished_runs_of_its_own_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    Journal(path, {"threads": 2}).add("0/a", {"x": 1})
    Journal(path, {"threads": 1}).add("0/a", {"x": 2})
    with path.open("ab") as file:
        file.write(b'{"key": "0/b", "settings": {"thr')  # a crash while it was written
    again = Journal(path, {"threads": 2})
    assert again.runs == {"0/a": {"x": 1}}
    again.add("0/b", {"x": 3})
    assert Journal(path, {"threads": 2}).runs == {"0/a": {"x": 1}, "0/b": {"x": 3}}
    assert Journal(path, {"threads": 1}).runs == {"0/a": {"x": 2}}


def test_a_pair_without_both_figures_has_no_quotient() -> None:
    found = quotients([(6.0, 2.0), (None, 1.0), (1.0, None), (1.0, 0.0), (0.0, 4.0), (8.0, 4.0)])
    assert found is not None
    assert (found.each, found.median, found.low, found.high) == ((3.0, 0.0, 2.0), 2.0, 0.0, 3.0)
    assert (found.over, found.under) == (6.0, 4.0)
    assert quotients([(1.0, 0.0)]) is None


def plan(rounds: int = 3) -> Plan:
    return Plan(("sluice", "vllm"), (Level(16, 48),), rounds, Ask(), lambda label, count: [])


def ran(rate: float, ok: int = 48) -> dict[str, Any]:
    spread = {"p50": 1000 / rate}
    figures = {"output_per_s": rate, "total_per_s": 2 * rate, "ttft_ms": spread, "tpot_ms": spread}
    return {"start_s": 3.0, "about": {}, "summary": figures | {"ok": ok, "offered": 48}}


def test_contenders_turn_from_round_to_round() -> None:
    assert [plan().order(n) for n in range(3)] == [("sluice", "vllm"), ("vllm", "sluice"), ("sluice", "vllm")]


def test_ratios_are_taken_inside_rounds_and_failed_runs_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", {})
    for number, (ours, theirs) in enumerate([(100, 50), (30, 10), (80, 20)]):
        journal.add(f"{number}/sluice/16x48", ran(ours))
        journal.add(f"{number}/vllm/16x48", ran(theirs, ok=47 if number == 2 else 48))
    found = compare.summary(plan(4), journal)
    ratio = next(r for r in found["levels"][0]["ratios"] if r["figure"] == "output tok/s")
    assert (ratio["ratio"], ratio["low"], ratio["high"], ratio["rounds"]) == (2.5, 2.0, 3.0, 2)
    text = compare.markdown(found)
    assert "| 16 | sluice / vllm | 2.50 (2.00 … 3.00) |" in text
    assert "| 16 | sluice | 80.0 |" in text and text.count("| 3 |") == 1, "three good rounds of ours, two of theirs"


async def nothing(run: Run) -> dict[str, Any]:
    raise AssertionError("not to be run here")


def test_a_row_is_judged_by_its_whole_pairs(tmp_path: Path) -> None:
    row = Row("x", 1, ((("",), ("a", "b")),), nothing, (Quotient("a/b", "v", "a", "b", ">= 2"),), ("v",), wanted="w")
    journal = Journal(tmp_path / "j", {})
    for key, value in {"r/0/a": 10, "r/0/b": 5, "r/1/a": 9, "r/1/b": 3, "r/2/a": 99}.items():
        journal.add(key, {"v": value})
    found = run_rows.judged("r", row, journal, 3)
    assert found["pairs"] == 2
    assert found["quotients"][0]["each"] == [2.0, 3.0] and found["quotients"][0]["ratio"] == 2.5
    text = run_rows.markdown(row, found)
    assert "- a/b: **2.50** (2.00 … 3.00; wanted >= 2)" in text
    assert "| b | 4 (3 … 5) |" in text and "- wanted: w" in text


def test_engine_options_of_row_and_caller_reach_the_engine_as_one(tmp_path: Path) -> None:
    given = ["--quantization=int8", "--engine-options=--dtype bf16", "--engine-options=--max-rows 16"]
    assert run_rows._joined(given) == ["--quantization=int8", "--engine-options=--dtype bf16 --max-rows 16"]
    assert run_rows._joined(["--engine-options=", "--engine-options="]) == ["--engine-options="]


def test_variants_of_a_pair_get_the_same_prompts_and_pairs_others() -> None:
    stack = Stack(Target("http://x"), {}, 0.0, {})

    def texts(variant: str, pair: int, label: str = "l") -> list[str]:
        return [p.text for p in Run(stack, variant, pair, 0, None).prompts("words:16", 3, label)]  # type: ignore[arg-type]

    assert texts("a", 0) == texts("b", 0)
    assert texts("a", 0)[0].split()[:4] != texts("a", 1)[0].split()[:4]
    assert texts("a", 0)[0].split()[:4] != texts("a", 0, "m")[0].split()[:4], "a prefix cache would find them"


def test_same_text_counts_replies() -> None:
    found = {"cache": [{"texts": ["1", "2"]}, {"texts": ["3"]}], "no cache": [{"texts": ["1", "x"]}, {"texts": ["3"]}]}
    assert same_text(found) == {"same text": "2 of 3"}


def test_kl_figures_are_read_or_missed_loudly(tmp_path: Path) -> None:
    said = "====\nMean    KLD:   0.004321 ±   0.000123\nMaximum KLD:   0.5\n99.9%   KLD: 0.4\n99.0%   KLD:   0.0301\n"
    assert parse(said) == {"mean": 0.004321, "p99": 0.0301, "max": 0.5}
    with pytest.raises(Unreachable, match="printed no p99"):
        parse(said.replace("99.0%", "98.0%"))
    (tmp_path / "a").write_text("a" * 20_000)
    (tmp_path / "b").write_text("b" * 20_000)
    text = make_text([tmp_path / "a", tmp_path / "b"], tmp_path / "made" / "kl.txt")
    assert text == (tmp_path / "made" / "kl.txt").read_text() and text.count("a") == text.count("b") == 6000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rows", "batchin"], "batchin"),
        (["compare", "--with", "tgi", "--model", __file__], "tgi"),
        (["compare", "--levels", "16", "--model", __file__], "USERSxREQUESTS"),
        (["peers", "tgi"], "tgi"),
    ],
)
def test_wrong_names_are_told_before_anything_starts(arguments: list[str], said: str, tmp_path: Path) -> None:
    more = [] if arguments[0] == "peers" else ["--work", str(tmp_path)]
    if arguments[0] == "rows":
        more += ["--model", __file__]
    done = CliRunner().invoke(app, [*arguments, *more])
    assert done.exit_code == 2 and said in done.output


def test_help_names_every_row() -> None:
    done = CliRunner().invoke(app, ["rows", "--help"])
    assert all(f"{name} (about" in done.output for name in ROWS)
