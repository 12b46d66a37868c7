"""The embedding backend under the real scheduler: whole texts, packed, each vector its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.backends.contract import SequenceInput
from engine.backends.embedding import Embedding
from engine.protocol.messages import Sampling
from engine.scheduler import Scheduler, SchedulerConfig, create
from engine.scheduler.contract import Request
from engine.text import Tokenizer


@pytest.fixture(scope="module")
def backend(embedding_model: Path) -> Embedding:
    return Embedding.load(embedding_model, threads=1)


def scheduler_of(backend: Embedding, step_tokens: int = 0) -> Scheduler:
    capacity = backend.capacity
    tokens = step_tokens or capacity.max_step_tokens
    return create(
        "tiered",
        SchedulerConfig(
            block_size=capacity.block_size,
            device_blocks=capacity.device_blocks,
            max_rows=min(tokens, capacity.max_rows),
            max_step_tokens=tokens,
            context_length=capacity.context_length,
        ),
    )


def submit(backend: Embedding, scheduler: Scheduler, number: int, ids: list[int], tier: int = 1) -> None:
    request = Request(number, number, tier, "alpha", tuple(ids), 0, 0.0, 10.0, 1.0, cost_tokens=len(ids))
    scheduler.submit(request, 0.0)
    backend.add(SequenceInput(number, tuple(ids), len(ids), Sampling(max_tokens=0), 0, 0))


def run(backend: Embedding, scheduler: Scheduler) -> tuple[dict[int, list[float]], list[list[int]]]:
    """Vectors by sequence, and the sequences of each step."""
    vectors: dict[int, list[float]] = {}
    steps: list[list[int]] = []
    while not scheduler.idle:
        plan = scheduler.plan(float(len(steps)))
        outcome = backend.execute(plan)
        advances = scheduler.commit(plan, outcome, float(len(steps)))
        assert all(a.finish == "stop" and not a.tokens for a in advances)
        assert [a.sequence for a in advances] == [s.sequence for s in plan.slices]
        vectors |= backend.extras().vectors
        if plan.slices:
            steps.append([s.sequence for s in plan.slices])
    scheduler.check()
    return vectors, steps


def texts(count: int, longest: int) -> list[list[int]]:
    chance = random.Random(3)
    return [[101, *chance.choices(range(1000, 30000), k=chance.randrange(longest - 1)), 102] for _ in range(count)]


def test_batch_mates_do_not_change_a_vector(backend: Embedding) -> None:
    given = texts(40, 120)
    scheduler = scheduler_of(backend, step_tokens=512)
    for number, ids in enumerate(given):
        submit(backend, scheduler, number, ids)
    together, steps = run(backend, scheduler)
    assert len(steps) > 3 and max(len(step) for step in steps) > 3
    for number, ids in enumerate(given[:8]):
        submit(backend, scheduler, 100 + number, ids)
        alone, _ = run(backend, scheduler)
        assert alone[100 + number] == together[number]


def test_no_step_is_larger_than_its_budget_and_none_is_split(backend: Embedding) -> None:
    given = texts(30, 200)
    scheduler = scheduler_of(backend, step_tokens=300)
    for number, ids in enumerate(given):
        submit(backend, scheduler, number, ids)
    vectors, steps = run(backend, scheduler)
    assert sorted(vectors) == list(range(30)) and sorted(n for step in steps for n in step) == list(range(30))
    assert max(sum(len(given[n]) for n in step) for step in steps) <= 300


def test_a_better_tier_goes_before_a_waiting_batch_and_has_credit_for_it(backend: Embedding) -> None:
    scheduler = scheduler_of(backend, step_tokens=64)
    for number in range(100):
        submit(backend, scheduler, number, [101, 1000 + number, 102], tier=2)
    rooms = scheduler.room(0.0)
    assert rooms[2].slots == 0 and rooms[0].evictable_slots == 64 and rooms[0].evictable_tokens > 0
    submit(backend, scheduler, 100, [101, 2000, 102], tier=0)
    _, steps = run(backend, scheduler)
    assert 100 in steps[0] and len(steps) > 4


def test_a_cancelled_text_is_forgotten(backend: Embedding) -> None:
    scheduler = scheduler_of(backend)
    for number in range(3):
        submit(backend, scheduler, number, [101, 1000, 102])
    scheduler.end(1, 0.0)
    vectors, _ = run(backend, scheduler)
    assert sorted(vectors) == [0, 2] and not backend._inputs


def test_ids_outside_the_vocabulary_are_refused_before_they_spoil_a_step(backend: Embedding) -> None:
    for wrong in (30522, -1):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            backend.add(SequenceInput(1, (101, wrong, 102), 3, Sampling(max_tokens=0), 0, 0))


def test_the_card_says_what_it_is(backend: Embedding, embedding_model: Path) -> None:
    card = backend.card
    assert card.capabilities == ("embedding",) and card.embedding_dimensions == 384
    assert card.context_length == 256 and card.price_class == card.model == "all-minilm-l6-v2"
    longer = Embedding.load(embedding_model, threads=1, context_length=4096)
    assert longer.card.context_length == 512 and longer.card.hash != card.hash, (
        "no more than the weights have positions"
    )
    assert longer.fingerprint() == backend.fingerprint()


def test_its_tokenizer_is_the_models_own(backend: Embedding, embedding_model: Path) -> None:
    import tokenizers

    peer = tokenizers.Tokenizer.from_file(str(embedding_model / "tokenizer.json"))
    peer.no_padding()
    peer.no_truncation()
    ours = Tokenizer(backend.card)
    for text in ("Hello, world!", "Grüße 世界 \U0001f600", "unbelievable", " ", "a\nb\tc", "x" * 200):
        assert ours.encode(text) == peer.encode(text).ids
    assert ours.decode(ours.encode("Unbelievable embeddings")) == "unbelievable embeddings"
    assert ours.encode("[SEP]").count(102) == 1 and ours.encode("[SEP]", special=True) == [101, 102]
