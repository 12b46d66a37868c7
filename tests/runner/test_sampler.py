"""The sampler against a specification written for one row in plain numpy, sorting everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.backends.contract import SequenceInput
from engine.protocol.messages import Sampling
from engine.runner.batch import SampleRow
from engine.runner.random import PURPOSE_TOKEN, uniforms
from engine.runner.sampler import Sampler, token_infos
from engine.runner.sequences import SequenceState

VOCABULARY = 700  # larger than the candidates tried before a full sort
ENDS = (2, 5)


def row(sampling: Sampling, tokens: tuple[int, ...], prompt: int, seed: int = 0, choice: int = 0) -> SampleRow:
    state = SequenceState(SequenceInput(1, tokens, prompt, sampling, seed, choice), 1)
    return SampleRow(state, len(tokens))


def specified(logits: np.ndarray, how: Sampling, tokens: tuple[int, ...], prompt: int, number: float) -> int:
    logits = logits.astype(np.float32).copy()
    for token, bias in how.logit_bias.items():
        logits[token] += np.float32(bias)
    for token in set(tokens):
        value = logits[token]
        penalty = np.float32(how.repetition_penalty)
        logits[token] = value / penalty if value > 0 else value * penalty
    output = tokens[prompt:]
    for token in set(output):
        logits[token] -= np.float32(how.presence_penalty + how.frequency_penalty * output.count(token))
    if len(output) < how.min_tokens:
        logits[list({*ENDS, *how.stop_token_ids})] = -np.inf
    if how.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / max(how.temperature, 1e-5)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if how.min_p > 0:
        order = [i for i in order if probs[i] >= how.min_p * probs[order[0]]]
    if how.top_k > 0:
        order = order[: how.top_k]
    if how.top_p < 1:
        total, mass, kept = probs[order].sum(), 0.0, []
        for i in order:
            if kept and mass >= how.top_p * total:
                break
            kept.append(i)
            mass += probs[i]
        order = kept
    ids = sorted(order)
    sums = np.cumsum(probs[ids])
    return ids[int(np.searchsorted(sums, number * sums[-1], side="right"))]


samplings = st.builds(
    Sampling,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.999999, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 600, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.1, 0.9]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 3.0, 100.0]), max_size=3),
    stop_token_ids=st.sampled_from([(), (9,)]),
    min_tokens=st.sampled_from([0, 2, 6]),
)


@settings(derandomize=True, max_examples=150, deadline=None, phases=[Phase.generate])
@given(
    st.lists(samplings, min_size=1, max_size=5),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=3, max_size=9),
)
def test_every_row_is_as_specified(hows: list[Sampling], seed: int, spread: float, tokens: list[int]) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, (len(hows), VOCABULARY)).astype(np.float32)
    rows = [row(how, tuple(tokens), 3, seed, choice) for choice, how in enumerate(hows)]
    chosen, sound = Sampler(ENDS).sample(torch.from_numpy(logits), rows)
    assert all(sound)
    for r, how in enumerate(hows):
        number = uniforms(np.array([seed], np.uint64), np.array([r]), np.array([len(tokens)]), PURPOSE_TOKEN)[0]
        assert chosen[r] == specified(logits[r], how, tuple(tokens), 3, number)


def test_frequencies_are_those_of_the_distribution() -> None:
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    logits = torch.from_numpy(np.log(probs).astype(np.float32)).expand(4000, 4)
    how = Sampling(max_tokens=1)
    chosen, _ = Sampler(()).sample(logits, [row(how, (0,) * (1 + n % 50), 1, seed=n // 50) for n in range(4000)])
    counts = np.bincount(chosen, minlength=4) / 4000
    assert np.abs(counts - probs).max() < 0.03


def test_numbers_depend_on_all_they_are_for_and_nothing_else() -> None:
    def number(seed: int, choice: int, position: int, purpose: int) -> float:
        return float(uniforms(np.array([seed], np.uint64), np.array([choice]), np.array([position]), purpose)[0])

    base = number(1, 0, 5, 1)
    assert 0 <= base < 1
    assert number(1, 0, 5, 1) == base
    assert len({base, number(2, 0, 5, 1), number(1, 1, 5, 1), number(1, 0, 6, 1), number(1, 0, 5, 2)}) == 5


def test_a_row_that_is_not_a_number_fails_alone() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = float("nan")
    logits[2, 3] = 1.0
    greedy = Sampling(max_tokens=1, temperature=0.0)
    tokens, sound = Sampler(()).sample(logits, [row(greedy, (1,), 1)] * 3)
    assert sound == [True, False, True]
    assert tokens[2] == 3


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_are_the_models_own(count: int) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -float("inf")]])
    (info,) = token_infos(logits, [3], [count])
    expected = torch.log_softmax(logits[0], 0)
    assert info.logprob == -9999.0
    assert [one.token for one in info.top] == [1, 2, 0][:count]
    assert [one.logprob for one in info.top] == pytest.approx(expected[[1, 2, 0][:count]].tolist())
