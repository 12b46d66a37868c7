"""From messages or prompts to token ids, under a byte cap: short ones at once, others in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from engine.protocol.messages import ModelCard
from engine.text import ChatOptions, TemplateError, Tokenizer
from gateway.errors import ApiError

__all__ = ["Prompts"]

T = TypeVar("T")

_THREADS = 2
_SHORT = 1024
"""Characters that are encoded (in about 0.3 ms) before a thread would have woken and handed its result back."""
_FEW = 8
"""Messages, likewise."""
_SLOW_S = 0.003
_KEPT_OFF = 2000
"""A card whose template takes longer than that over two short prompts in a row is kept off the event loop for two
thousand times as long as the second took: it can't cost the other streams more than about a thousandth of their time.
One alone says nothing: a garbage collection may have fallen into it."""
_PLAIN = frozenset({"role", "content"})
_BYTES_PER_TOKEN = 64
"""No tokenizer here has tokens this long on average over a whole prompt: more bytes than this can't fit the context."""


class Prompts:
    """Tokenizers by card, and the threads they run in. The library releases the interpreter lock while it encodes."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._tokenizers: dict[str, Tokenizer] = {}
        self._slow_until: dict[str, float] = {}
        self._suspects: set[str] = set()
        """Cards that were slow the last time."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def chat(
        self,
        card: ModelCard,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: ChatOptions,
    ) -> tuple[tuple[int, ...], ...]:
        """The ids of a conversation."""
        size = sum(len(m.get("content") or "") for m in messages)
        _check_size(card, size, "messages")
        short = size <= _SHORT and len(messages) <= _FEW and not (tools or options.variables)
        short = short and all(m.keys() <= _PLAIN for m in messages)

        def encode() -> tuple[tuple[int, ...], ...]:
            try:
                tokenizer = self.tokenizer(card)
                return (tuple(tokenizer.chat(messages, tools=tools, options=options)),)
            except TemplateError as error:
                raise ApiError(
                    "invalid_value", f"The messages do not fit this model: {error}.", param="messages"
                ) from None

        return await self._encode(card, short, encode)

    async def completion(self, card: ModelCard, prompts: Sequence[str | list[int]]) -> tuple[tuple[int, ...], ...]:
        """The ids of each prompt. Given ids are checked against the vocabulary."""
        _check_size(card, max(len(p) for p in prompts if isinstance(p, str)) if _any_text(prompts) else 0, "prompt")

        def encode() -> tuple[tuple[int, ...], ...]:
            return tuple(self._ids(card, prompt) for prompt in prompts)

        return await self._encode(card, sum(map(len, prompts)) <= _SHORT, encode)

    async def embedding(self, card: ModelCard, inputs: Sequence[str | list[int]]) -> tuple[tuple[int, ...], ...]:
        """The ids of each text, special tokens in it read as text. Given ids are taken as they are."""
        _check_size(card, max(len(p) for p in inputs if isinstance(p, str)) if _any_text(inputs) else 0, "input")

        def encode() -> tuple[tuple[int, ...], ...]:
            tokenizer = self.tokenizer(card)
            for given in inputs:
                if not isinstance(given, str):
                    _check_vocabulary(card, given, "input")
            return tuple(tuple(tokenizer.encode(p) if isinstance(p, str) else p) for p in inputs)

        return await self.off_loop(encode)

    async def text(self, card: ModelCard, text: str) -> list[int]:
        """The ids of a text, as a prompt would have them."""
        _check_size(card, len(text), "prompt")
        return await self.off_loop(lambda: self.tokenizer(card).encode(text, special=True))

    async def decode(self, card: ModelCard, ids: Sequence[int]) -> str:
        """The text of given ids, special tokens written out."""
        _check_vocabulary(card, ids, "tokens")
        return await self.off_loop(lambda: self.tokenizer(card).decode(ids, skip_special=False))

    async def pieces(self, card: ModelCard, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself; U+FFFD stands for a part of a character."""
        bytes_of = self.tokenizer(card).token_bytes
        return [bytes_of(i).decode("utf-8", "replace") for i in ids]

    def _ids(self, card: ModelCard, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = tuple(self.tokenizer(card).encode(prompt, special=True))
            # An empty prompt means: begin. A model without a BOS token begins with its end-of-text token.
            start = card.bos_id if card.bos_id is not None else (card.eos_ids[0] if card.eos_ids else None)
            if not ids and start is None:
                raise ApiError("invalid_value", "The prompt is empty.", param="prompt")
            return ids or (start,)  # type: ignore[return-value]
        _check_vocabulary(card, prompt, "prompt")
        return tuple(prompt)

    async def _encode(self, card: ModelCard, short: bool, work: Callable[[], T]) -> T:
        """Run it here if it is short, else in a thread; there too while its card has proved slow over short ones."""
        started = time.monotonic()
        if not short or card.hash not in self._tokenizers or started < self._slow_until.get(card.hash, 0.0):
            return await self.off_loop(work)
        busy = time.thread_time()
        try:
            return work()
        finally:
            took = time.thread_time() - busy
            if took <= _SLOW_S:
                self._suspects.discard(card.hash)
            elif card.hash in self._suspects:
                self._slow_until[card.hash] = started + took * _KEPT_OFF
            else:
                self._suspects.add(card.hash)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run in a tokenizer thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def tokenizer(self, card: ModelCard) -> Tokenizer:
        """The card's tokenizer; making one takes about a second, so call it in a tokenizer thread."""
        known = self._tokenizers.get(card.hash)
        if known is None:
            known = self._tokenizers[card.hash] = Tokenizer(card)
        return known


def _check_vocabulary(card: ModelCard, ids: Sequence[int], param: str) -> None:
    for token in ids:
        if not 0 <= token < card.vocab_size:
            message = f"{token} is not a token id of this model (0 to {card.vocab_size - 1})."
            raise ApiError("invalid_value", message, param=param)


def _any_text(prompts: Sequence[str | list[int]]) -> bool:
    return any(isinstance(p, str) for p in prompts)


def _check_size(card: ModelCard, length: int, param: str) -> None:
    """A text that can't fit is refused before it costs a second of tokenising."""
    if length > card.context_length * _BYTES_PER_TOKEN:
        raise ApiError(
            "context_length_exceeded",
            f"This model's maximum context length is {card.context_length} tokens. However, your {param} is far "
            f"longer ({length} characters). Please reduce the length of the {param}.",
            param=param,
        )
