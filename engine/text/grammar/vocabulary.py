"""A tokenizer's vocabulary as the grammar library sees it, and grammars compiled against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.text.grammar.constraint import ConstraintError, library_grammar, parse
from engine.text.tokenizer import Tokenizer

__all__ = ["Grammar", "Vocabulary"]

_LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,  # about 3 ms
    max_lexer_states=50_000,  # about 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Work the library may do before it gives up on a grammar. Counted, not timed: the same everywhere."""


class Vocabulary:
    """The bytes of every token, in the library's form. Making one takes half a second; keep it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        card = tokenizer.card
        self.size = card.vocab_size
        self.words = -(-self.size // 32)
        """32-bit words of a mask."""
        self.ends = card.eos_ids
        if not self.ends:
            raise ConstraintError("this model has no token that ends an answer")
        self.library = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer)), self.size, list(self.ends))

    def compile(self, constraint: str) -> Grammar:
        """From `Sampling.grammar`, at its beginning. Bounded by `_LIMITS`. Raises `ConstraintError`."""
        matcher = LLMatcher(self.library, library_grammar(parse(constraint)), limits=_LIMITS, log_level=0)
        if matcher.is_error():
            raise ConstraintError(_sentence(matcher.get_error()))
        return Grammar(self, matcher)


class Grammar:
    """A compiled constraint and how far a text has come in it. Not thread-safe; `copy` for every text."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary, self._matcher = vocabulary, matcher

    def copy(self) -> Grammar:
        """Independent from here on, with what was already computed shared."""
        return Grammar(self._vocabulary, self._matcher.deep_copy())

    def push(self, tokens: Sequence[int]) -> None:
        """The text goes on with these. Raises `ConstraintError` when it may not, or the grammar got too complex."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise ConstraintError(_sentence(self._matcher.get_error()))

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may follow: one bit each, least significant first, in `Vocabulary.words` int32 words.

        End tokens are among them only where the text may end. Raises `ConstraintError`.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(_sentence(self._matcher.get_error()))

    def accepted(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first on, may follow. Changes nothing."""
        return self._matcher.validate_tokens(list(tokens))

    def rollback(self, count: int) -> None:
        """Take back the last tokens pushed."""
        if not self._matcher.rollback(count):
            raise ConstraintError(_sentence(self._matcher.get_error()))

    @property
    def complete(self) -> bool:
        """The text may end here."""
        return self._matcher.is_accepting()


class _Tokens:
    """What `TokenizerWrapper` asks for. Our own bytes, so that the grammar sees what the client will."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        card = tokenizer.card
        self.eos_token_id, self.bos_token_id = card.eos_ids[0], card.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(card.vocab_size)]
        self.special_token_ids = [i for i in range(card.vocab_size) if tokenizer.is_special(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.pieces(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _sentence(error: str) -> str:
    """The library's message on one line, bounded: it may quote the grammar at length."""
    if error.startswith("NoExtension"):
        return "nothing satisfies it"
    return " ".join(error.split())[:300] or "the grammar can't be followed"
