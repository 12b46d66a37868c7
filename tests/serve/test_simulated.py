"""The simulated backend by itself: its options, its text, its speed, its failures."""

from __future__ import annotations

import pytest

from engine.backends.contract import SequenceInput
from engine.backends.simulated import Simulated, SimulatedCrash, Simulation
from engine.protocol.messages import Sampling
from engine.scheduler.step import Drop, Slice, StepPlan
from engine.text import Tokenizer


def generate(backend: Simulated, prompt: str, count: int, *, seed: int = 1, made: bytes = b"") -> bytes:
    """`count` tokens of one sequence, the first `made` of which were delivered before."""
    tokens = tuple(prompt.encode()) + tuple(made)
    backend.add(SequenceInput(1, tokens, len(prompt.encode()), Sampling(max_tokens=count), seed, 0))
    out = bytearray()
    position, length = 0, len(tokens)
    while len(out) < count:
        outcome = backend.execute(StepPlan(len(out), slices=(Slice(1, position, length, True),)))
        if outcome.faults:
            break
        position, length = position + length, 1
        token = outcome.samples[0].tokens[0]
        if token in backend.card.eos_ids:
            break
        out.append(token)
    backend.execute(StepPlan(0, drops=(Drop(1),)))
    return bytes(out)


def make(options: str, slept: list[float] | None = None) -> Simulated:
    sink: list[float] = [] if slept is None else slept
    return Simulated("demo", Simulation.parse(options), sleep=sink.append)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("speed=3", "speed=3"),
        ("decode_tps", "decode_tps"),
        ("tokens=many", "tokens"),
        ("prefill_tps=-1", "prefill_tps"),
    ],
)
def test_a_wrong_option_is_named(options: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Simulation.parse(options)


def test_words_depend_on_seed_and_position_alone() -> None:
    backend = make("")
    whole = generate(backend, "hi", 60)
    assert whole == generate(backend, "another prompt", 60)
    assert whole != generate(backend, "hi", 60, seed=2)
    assert all(len(word) == 5 for word in whole.decode().split())
    assert generate(backend, "hi", 40, made=whole[:20]) == whole[20:], "a resumed request goes on with the same text"


def test_echo_and_fixed_text_end_by_themselves() -> None:
    assert generate(make("text=echo"), "say this", 100) == b"say this"
    assert generate(make("text=fixed words"), "x", 100) == b"fixed words"
    assert len(generate(make("tokens=7"), "x", 100)) == 7


def test_the_speed_is_the_programmed_one() -> None:
    slept: list[float] = []
    generate(make("decode_tps=10,prefill_tps=1000", slept), "x" * 500, 11)
    assert sum(slept) == pytest.approx(11 / 10 + 500 / 1000, rel=0.05)


def test_failures_hit_only_marked_prompts() -> None:
    backend = make("fail_after=3,on=poison")
    assert len(generate(backend, "fine", 10)) == 10
    assert len(generate(backend, "a poison pill", 10)) == 3
    with pytest.raises(SimulatedCrash):
        generate(make("crash_after=3,on=poison"), "poison", 10)


def test_its_tokenizer_is_bytes_and_its_template_works() -> None:
    backend = make("")
    tokenizer = Tokenizer(backend.card)
    text = "Grüße, 世界 \U0001f600\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_card_hash_tells_models_apart() -> None:
    assert make("").card.hash == make("decode_tps=1").card.hash
    assert make("").card.hash != Simulated("other", Simulation()).card.hash
