from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.card import model_card
from engine.backends.causal_lm import CausalLM
from engine.backends.simulated import create
from engine.models import open_checkpoint
from engine.protocol.messages import ModelCard
from engine.text import Tokenizer
from engine.text.grammar import Vocabulary


@pytest.fixture(scope="session")
def real_card(model_file: Path) -> ModelCard:
    checkpoint = open_checkpoint(model_file)
    return model_card(checkpoint, name="real", context_length=2048, capabilities=("chat", "grammar"), price_class="x")


@pytest.fixture(scope="session")
def byte_card() -> ModelCard:
    """A token is a byte."""
    return create("bytes").card


@pytest.fixture(scope="session", params=["bytes", "real"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(request.getfixturevalue(f"{request.param.removesuffix('s')}_card"))


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture(scope="session")
def backend(model_file: Path) -> Iterator[CausalLM]:
    """The real model in fp32: text that can be compared."""
    made = CausalLM.load(model_file, threads=1, dtype="fp32", kv_memory_bytes=200 << 20, host_memory_bytes=200 << 20)
    yield made
    made.close()
