from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.backends.causal_lm import CausalLM
from engine.text import Tokenizer


@pytest.fixture(scope="session")
def load(model_file: Path) -> Callable[..., CausalLM]:
    def load(**options: object) -> CausalLM:
        defaults: dict[str, object] = {"threads": 1, "dtype": "fp32", "kv_memory_bytes": 200 << 20}
        return CausalLM.load(model_file, **(defaults | options))  # type: ignore[arg-type]

    return load


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backend(load: Callable[..., CausalLM], request: pytest.FixtureRequest) -> CausalLM:
    """The real model in fp32, with each kernel set."""
    return load(kernels=request.param, host_memory_bytes=200 << 20)


@pytest.fixture(scope="session")
def tokenizer(backend: CausalLM) -> Tokenizer:
    return Tokenizer(backend.card)
