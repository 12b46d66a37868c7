"""Constrained rows on the real model: alone, in company, in chunks, parked, moved, and at fault."""

from __future__ import annotations

import json
from queue import SimpleQueue
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.backends.causal_lm import CausalLM
from engine.backends.contract import SequenceInput
from engine.protocol.messages import Sampling
from engine.scheduler.step import Drop, Slice, Start, StepPlan
from engine.text import Tokenizer
from tests.grammar.test_constraints import SCHEMAS
from tests.runner.driver import Driver, Live

TOKENS = 14
LONG = {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        "minItems": 9}  # fmt: skip


def grammar(schema: dict[str, Any]) -> str:
    return json.dumps({"kind": "json_schema", "schema": schema})


@pytest.fixture(scope="module")
def tokenizer(backend: CausalLM) -> Tokenizer:
    return Tokenizer(backend.card)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    asked = ("Name three colours.", "A list of numbers, please.", "Hi")
    return [tokenizer.chat([{"role": "user", "content": text}]) for text in asked]


HOW = [
    Sampling(max_tokens=TOKENS, temperature=0.0, grammar=grammar(LONG)),
    Sampling(max_tokens=TOKENS, temperature=0.9, top_p=0.9, grammar=grammar(LONG), logprobs=2),
    Sampling(max_tokens=TOKENS, temperature=0.0),
]


@pytest.fixture(scope="module")
def alone(backend: CausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return [Driver(backend).run([p], [how], seed=5)[0].output for p, how in zip(prompts, HOW, strict=True)]


def test_the_constraint_shows(tokenizer: Tokenizer, alone: list[list[int]]) -> None:
    texts = [tokenizer.decode(ids).lstrip() for ids in alone]
    assert texts[0].startswith("[") and texts[1].startswith("[") and not texts[2].startswith("[")


@pytest.mark.parametrize("options", [{}, {"chunk": 5}, {"park_every": 3}])
def test_company_chunks_and_parking_change_nothing(
    backend: CausalLM, prompts: list[list[int]], alone: list[list[int]], options: dict[str, int]
) -> None:
    live = Driver(backend, **options).run(prompts, HOW, seed=5)
    assert [one.output for one in live] == alone
    assert [len(one.infos) for one in live] == [0, TOKENS, 0]


def test_a_sequence_goes_on_elsewhere_from_the_tokens_delivered(
    backend: CausalLM, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    class Moved(Driver):
        def _add(self, prompt: list[int], sampling: Sampling, seed: int) -> Live:
            self._number += 1
            given = (*prompt, *alone[self._number - 1][:6])
            source = SequenceInput(self._number, given, len(prompt), sampling, seed, 0)
            self.backend.add(source)
            return Live(source, len(given))

    how = [Sampling(**{**{f: getattr(h, f) for f in h.__struct_fields__}, "max_tokens": TOKENS - 6}) for h in HOW]
    live = Moved(backend).run(prompts, how, seed=5)
    assert [one.output for one in live] == [ids[6:] for ids in alone]


def complete(backend: CausalLM, prompt: list[int], how: Sampling, seed: int) -> list[int] | None:
    """As the scheduler would: to an end token; None when `max_tokens` came first."""
    driver = Driver(backend)
    one = driver._add(prompt, how, seed)
    starts: tuple[Start, ...] = (Start(one.source.sequence, (), 0),)
    try:
        while not one.done:
            driver._step([one], starts)
            starts = ()
            if one.output[-1] in backend.card.eos_ids:
                return one.output[:-1]
        return None
    finally:
        driver._execute(StepPlan(driver.step, drops=(Drop(one.source.sequence),)))


@pytest.mark.parametrize("name", ["flat", "one of, told apart", "unicode names"])
def test_what_the_model_completes_is_valid(backend: CausalLM, tokenizer: Tokenizer, name: str) -> None:
    prompt = tokenizer.chat([{"role": "user", "content": "Give me an example as JSON."}])
    for seed, temperature in enumerate((0.0, 1.5)):
        how = Sampling(max_tokens=40, temperature=temperature, grammar=grammar(SCHEMAS[name]))
        output = complete(backend, prompt, how, seed)
        if output is not None:
            Draft202012Validator(SCHEMAS[name]).validate(json.loads(tokenizer.decode(output)))
        else:
            assert temperature > 0  # hot enough to wander in blank space


def test_a_fault_of_one_grammar_ends_its_sequence_alone(
    backend: CausalLM, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    """Tokens said to be delivered that its grammar could never have let pass."""
    driver = Driver(backend)
    sound = driver._add(prompts[0], HOW[0], 5)
    wrong = tokenizer.pieces("no list at all")
    bad = SequenceInput(99, (*prompts[1], *wrong), len(prompts[1]), HOW[0], 5, 0)
    backend.add(bad)
    starts = (Start(sound.source.sequence, (0, 1, 2, 3), 0), Start(99, (4, 5, 6, 7), 0))
    slices = (Slice(sound.source.sequence, 0, len(prompts[0]), True), Slice(99, 0, len(bad.tokens), True))
    outcome = backend.execute(StepPlan(0, slices, starts))
    assert [number for number, _ in outcome.faults] == [99] and "can't go on" in outcome.faults[0][1]
    assert [s.sequence for s in outcome.samples] == [sound.source.sequence]
    backend.execute(StepPlan(1, drops=(Drop(99), Drop(sound.source.sequence))))


def test_drafts_are_held_to_the_grammar(
    backend: CausalLM, tokenizer: Tokenizer, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Speculation yields what sampling one by one yields: right drafts stand, one that the grammar forbids does not."""
    forbidden = tokenizer.pieces("x")[0]
    for drafts, kept in ((alone[0][1:4], 4), ((alone[0][1], forbidden), 2)):
        number = 500 + kept
        backend.add(SequenceInput(number, (*prompts[0], alone[0][0]), len(prompts[0]), HOW[0], 5, 0))
        length = len(prompts[0]) + 1
        plan = StepPlan(0, (Slice(number, 0, length, True, tuple(drafts)),), (Start(number, tuple(range(8)), 0),))
        (sample,) = backend.execute(plan).samples
        assert list(sample.tokens) == alone[0][1 : 1 + kept]
        backend.execute(StepPlan(1, drops=(Drop(number),)))


def test_a_constraint_is_prepared_beside_the_steps_and_once(backend: CausalLM) -> None:
    told: SimpleQueue[str] = SimpleQueue()
    good, bad = grammar({"type": "integer", "minimum": 4}), grammar({"uniqueItems": True})
    assert not backend.prepare(good, told.put) and not backend.prepare(good, told.put)
    assert [told.get(timeout=60), told.get(timeout=60)] == ["", ""]
    assert backend.prepare(good, told.put)
    assert not backend.prepare(bad, told.put) and "uniqueItems" in told.get(timeout=60)
