"""The real model under the real scheduler, with too little memory: what is parked, copied or shared changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.backends.causal_lm import CausalLM
from engine.backends.contract import SequenceInput
from engine.protocol.messages import Sampling
from engine.scheduler import SchedulerConfig, create
from engine.scheduler.contract import Request
from engine.scheduler.step import StepPlan
from engine.text import Tokenizer
from tests.models.prompts import LONG, SHORT

BLOCKS = 12
Made = dict[int, tuple[list[int], bytes]]


@pytest.fixture(scope="module")
def small(load: Callable[..., CausalLM]) -> CausalLM:
    return load(kernels="cpu", kv_memory_bytes=BLOCKS * 737280, host_memory_bytes=64 * 737280)


def sources(tokenizer: Tokenizer) -> list[SequenceInput]:
    """Greedy and seeded ones of unlike lengths; the last two are two choices of one request."""
    ids = [tokenizer.encode(text) for text in (*SHORT[:3], LONG[:150])]
    prompts = [*ids, ids[3][:37], ids[3][:37]]
    greedy, drawn = Sampling(max_tokens=30, temperature=0.0), Sampling(max_tokens=24, temperature=0.9, top_p=0.9)
    hows = [greedy, drawn, greedy, drawn, drawn, drawn]
    return [
        SequenceInput(number, tuple(prompt), len(prompt), how, 5, int(number == 5))
        for number, (prompt, how) in enumerate(zip(prompts, hows, strict=True))
    ]


def run(backend: CausalLM, given: list[SequenceInput], rows: int) -> tuple[Made, list[StepPlan]]:
    """Of each sequence its output and the KV bytes of all computed tokens, and the plans that led there."""
    capacity = backend.capacity
    config = SchedulerConfig(
        capacity.block_size, capacity.device_blocks, capacity.host_blocks, rows, 48, 512, block_bytes=737280,
        prefix_cache=False, forecast_output=False,
    )  # fmt: skip
    scheduler = create("tiered", config)
    for one in given:
        backend.add(one)
        group, longest = min(one.sequence, 4), one.sampling.max_tokens
        scheduler.submit(Request(one.sequence, group, 1, "t", one.tokens, longest, 0.0, 60.0, 0.0), 0.0)
    made: Made = {}
    outputs: dict[int, list[int]] = {one.sequence: [] for one in given}
    plans: list[StepPlan] = []
    while not scheduler.idle:
        now = float(len(plans))
        plans.append(scheduler.plan(now))
        outcome = backend.execute(plans[-1])
        for piece in plans[-1].slices:
            one = given[piece.sequence - given[0].sequence]
            if piece.start + piece.length == len(one.tokens) + one.sampling.max_tokens - 1:
                made[one.sequence] = (
                    outputs[one.sequence],
                    kv_bytes(backend, piece.sequence, piece.start + piece.length),
                )
        for advance in scheduler.commit(plans[-1], outcome, now):
            outputs[advance.sequence] += advance.tokens
        scheduler.check()
    return made, plans


def kv_bytes(backend: CausalLM, sequence: int, tokens: int) -> bytes:
    runner = backend._live()
    state = runner._sequences[sequence]
    blocks = torch.from_numpy(state.blocks[: state.block_count].copy())
    kv = runner._model._kernels.read(runner._memory.store, blocks)[:tokens]
    return kv.contiguous().numpy().tobytes()


@pytest.mark.slow
def test_pressure_on_memory_changes_neither_text_nor_bytes(small: CausalLM, tokenizer: Tokenizer) -> None:
    given = sources(tokenizer)
    alone: Made = {}
    for one in given:
        alone |= run(small, [one], 1)[0]
    together, plans = run(small, given, 6)
    assert together == alone
    assert together[4][0] != together[5][0]
    assert any(plan.copies for plan in plans), "the second choice shares its sibling's prompt"
    assert any(plan.restores for plan in plans), "so little memory must have parked something"
