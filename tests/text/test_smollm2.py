"""The real tokenizer, rebuilt from the GGUF file's metadata."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.text import Detokenizer, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_file: Path) -> Tokenizer:
    from engine.backends.card import model_card
    from engine.models import open_checkpoint

    card = model_card(
        open_checkpoint(model_file), name="m", context_length=8192, capabilities=("chat",), price_class="p"
    )
    return Tokenizer(card)


def test_a_chat_is_what_the_model_was_trained_on(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "Hi <|im_end|>"}])
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert tokenizer.card.eos_ids == (0, 2)


def test_known_ids(tokenizer: Tokenizer) -> None:
    """Written down from the tokenizer.json that the model's authors publish."""
    assert tokenizer.encode("Hello world") == [19556, 905]


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("in 1969, 3.14159 and x2y٣")]
    assert [p for p in pieces if p.strip().isdigit() and p.isascii()] == [*"1969", *"314159", "2"]
    assert all(len(p.strip()) == 1 for p in pieces if any(c.isdigit() for c in p))


@pytest.mark.peer
@pytest.mark.slow
def test_the_same_ids_as_another_builder(tokenizer: Tokenizer, model_file: Path) -> None:
    """`transformers` rebuilds the tokenizer from the same metadata by its own code."""
    from transformers import AutoTokenizer

    peer = AutoTokenizer.from_pretrained(str(model_file.parent), gguf_file=model_file.name, local_files_only=True)
    texts = (
        "Hello world 123",
        "naïve café, isn't it?",
        "\n\n\tdef f(x):\n    return x\n",
        "日本の首都は東京です。🦊",
        "  a  b",
    )
    for text in texts:
        assert tokenizer.encode(text) == peer.encode(text, add_special_tokens=False)


@cache
def tokenizer_bytes(tokenizer: Tokenizer) -> frozenset[int]:
    tokens = map(tokenizer.token_bytes, range(tokenizer.card.vocab_size))
    return frozenset(token[0] for token in tokens if len(token) == 1)


def covered(tokenizer: Tokenizer, text: str) -> bool:
    """The vocabulary lacks bytes that only begin characters of unassigned planes: those can not be written in it."""
    return set(text.encode()) <= tokenizer_bytes(tokenizer)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(text=st.text(max_size=60), size=st.integers(1, 5))
def test_text_comes_back_whole(tokenizer: Tokenizer, text: str, size: int) -> None:
    assume(covered(tokenizer, text))
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids) == text
