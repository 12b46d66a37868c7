"""Token ids to text, a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Joined pieces (with `flush`) equal `Tokenizer.decode` of all ids, however they were cut.

    A character whose bytes are not all there yet is held back; U+FFFD appears only for bytes that can't be UTF-8, or
    for a character the text ends in the middle of.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = False

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids, return the text they complete."""
        tokenizer = self._tokenizer
        data = b"".join(tokenizer.token_bytes(i) for i in ids if not (self._skip_special and tokenizer.is_special(i)))
        if data and not self._started:
            self._started = True
            if tokenizer.strips_first_space:
                data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The text is over: an unfinished character becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def state(self) -> dict[str, Any]:
        return {"bytes": self._decoder.getstate()[0].hex(), "started": self._started}

    def restore(self, state: dict[str, Any]) -> None:
        self._decoder.reset()
        self._decoder.setstate((bytes.fromhex(state["bytes"]), 0))
        self._started = state["started"]
