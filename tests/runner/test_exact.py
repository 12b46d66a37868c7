"""Greedy and seeded fp32 text doesn't depend on batch-mates, chunk size or parking."""

from __future__ import annotations

import torch

from engine.backends.causal_lm import CausalLM
from engine.protocol.messages import Sampling
from engine.text import Tokenizer
from tests.models.prompts import LONG, SHORT
from tests.runner.driver import Driver, greedy

TOKENS = 8


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in (*SHORT[:5], LONG[:400])]


def test_batch_mates_and_chunks_change_nothing(backend: CausalLM, tokenizer: Tokenizer) -> None:
    ids = prompts(tokenizer)
    alone = [Driver(backend).run([p], [greedy(TOKENS)])[0].output for p in ids]
    together = Driver(backend).run(ids, [greedy(TOKENS)] * len(ids))
    chunked = Driver(backend, chunk=7).run(ids, [greedy(TOKENS)] * len(ids))
    assert [one.output for one in together] == alone
    assert [one.output for one in chunked] == alone
    assert tokenizer.decode(alone[0]).startswith(" Paris")


def test_seeded_sampling_is_a_function_of_the_seed(backend: CausalLM, tokenizer: Tokenizer) -> None:
    ids = prompts(tokenizer)[:4]
    how = Sampling(max_tokens=TOKENS, temperature=0.9, top_p=0.95)
    alone = [Driver(backend).run([p], [how], seed=11)[0].output for p in ids]
    together = Driver(backend, chunk=5).run(ids, [how] * len(ids), seed=11)
    other = Driver(backend).run(ids, [how] * len(ids), seed=12)
    assert [one.output for one in together] == alone
    assert [one.output for one in other] != alone


def test_parking_changes_neither_text_nor_bytes(backend: CausalLM, tokenizer: Tokenizer) -> None:
    ids = prompts(tokenizer)[:3]
    how = [greedy(TOKENS), Sampling(max_tokens=TOKENS, temperature=0.8), greedy(TOKENS)]
    plain, parked = Driver(backend, chunk=9), Driver(backend, chunk=9, park_every=2)
    wanted = kept_bytes(backend, plain, ids, how)
    assert kept_bytes(backend, parked, ids, how) == wanted


def kept_bytes(
    backend: CausalLM, driver: Driver, ids: list[list[int]], how: list[Sampling]
) -> list[tuple[list[int], bytes]]:
    """Of each sequence: its output, and the KV bytes of all computed tokens, read from wherever they lie at the end."""
    live = driver.run(ids, how, seed=3)
    runner = backend._live()
    read, store = runner._model._kernels.read, runner._memory.store
    result = []
    for one in live:
        kv = read(store, torch.tensor(one.blocks))[: one.computed]
        result.append((one.output, kv.contiguous().numpy().tobytes()))
    return result
