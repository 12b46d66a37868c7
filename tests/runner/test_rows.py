"""Rows of a step that are more than the next token of a sequence: drafts, and prompts that are told back."""

from __future__ import annotations

import pytest

from engine.backends.causal_lm import CausalLM
from engine.backends.contract import SequenceInput
from engine.scheduler.step import Drop, Slice, Start, StepPlan
from engine.text import Tokenizer
from tests.models.prompts import SHORT
from tests.runner.driver import Driver, greedy


def test_drafts_yield_what_single_steps_yield(backend: CausalLM, tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode(SHORT[0]))
    wanted = Driver(backend).run([list(prompt)], [greedy(7)])[0].output
    number, n = 900, len(prompt)
    backend.add(SequenceInput(number, prompt, n, greedy(7), 1, 0))
    blocks = tuple(range(-(-(n + 8) // backend.capacity.block_size)))

    def step(piece: Slice, *starts: Start) -> list[int]:
        return list(backend.execute(StepPlan(0, (piece,), starts=starts)).samples[0].tokens)

    made = step(Slice(number, 0, n, True), Start(number, blocks, 0))
    wrong = (wanted[3] + 1) % 1000
    made += step(Slice(number, n, 1, True, (wanted[1], wanted[2], wrong)))  # two stand, and the token after them
    assert made == wanted[:4]
    made += step(Slice(number, n + 3, 1, True, (wrong,)))  # none stands; what the wrong one wrote is overwritten
    made += step(Slice(number, n + 4, 1, True, (wanted[5],)))
    assert made == wanted
    backend.execute(StepPlan(0, drops=(Drop(number),)))


def test_a_prompt_told_back_has_the_numbers_of_its_making(backend: CausalLM, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(SHORT[1])
    made = Driver(backend).run([prompt], [greedy(5, logprobs=2)])[0]
    whole = prompt + made.output
    runs = [
        Driver(backend, chunk=chunk).run([whole, prompt], [greedy(1, echo=True, logprobs=2), greedy(1)])[0]
        for chunk in (10**6, 3)
    ]
    for one in runs:
        assert [info.token for info in one.infos] == whole[1:] + one.output
        for told, sampled in zip(one.infos[len(prompt) - 1 :], made.infos, strict=False):
            assert told.token == sampled.token
            assert told.logprob == pytest.approx(sampled.logprob, abs=1e-4)
            assert [top.token for top in told.top] == [top.token for top in sampled.top]
