"""What the runner knows of each sequence: its tokens, how to sample, and which blocks hold its KV."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import numpy as np

from engine.backends.contract import SequenceInput

__all__ = ["SequenceState", "Sequences"]


class SequenceState:
    """Tokens grow by doubling, so that no step copies what is already there."""

    __slots__ = ("_tokens", "block_count", "blocks", "given", "length", "row", "source")

    def __init__(self, source: SequenceInput, max_blocks: int) -> None:
        self.source = source
        self.given = len(source.tokens)
        self.length = self.given
        self._tokens = np.empty(max(64, self.given + source.sampling.max_tokens), np.int64)
        self._tokens[: self.given] = source.tokens
        self.blocks = np.zeros(max_blocks, np.int32)
        self.block_count = 0

    @property
    def tokens(self) -> np.ndarray:
        """All known tokens: prompt, then output."""
        return self._tokens[: self.length]

    @property
    def output(self) -> np.ndarray:
        """Tokens after the prompt, those delivered before a re-dispatch included."""
        return self._tokens[self.source.prompt_length : self.length]

    def append(self, tokens: Ids[int]) -> None:
        needed = self.length + len(tokens)
        if needed > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(needed, np.int64)])
        self._tokens[self.length : needed] = tokens
        self.length = needed

    def set_blocks(self, blocks: Ids[int]) -> None:
        self.block_count = 0
        self.add_blocks(blocks)

    def add_blocks(self, blocks: Ids[int]) -> None:
        end = self.block_count + len(blocks)
        if end > len(self.blocks):
            raise ValueError(f"sequence {self.source.sequence}: {end} blocks exceed the context length")
        self.blocks[self.block_count : end] = blocks
        self.block_count = end


class Sequences:
    """Sequences by number."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._by_number: dict[int, SequenceState] = {}

    def add(self, source: SequenceInput) -> None:
        if source.sequence in self._by_number:
            raise ValueError(f"sequence {source.sequence} is already known")
        self._by_number[source.sequence] = SequenceState(source, self._max_blocks)

    def drop(self, number: int) -> None:
        self._by_number.pop(number, None)

    def __getitem__(self, number: int) -> SequenceState:
        state = self._by_number.get(number)
        if state is None:
            raise KeyError(f"sequence {number} is not known to the runner")
        return state

    def __len__(self) -> int:
        return len(self._by_number)
