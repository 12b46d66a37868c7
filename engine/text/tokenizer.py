"""The tokenizer of a model card."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from engine.protocol.messages import ModelCard
from engine.text.chat import PLAIN, ChatOptions, ChatTemplate, TemplateError

__all__ = ["Tokenizer"]

_PROBE = "\0"
"""Content that no template strips or looks for."""
_PROBES = (("user",), ("system", "user", "assistant", "user"))
_NONE: Mapping[str, list[int]] = {}


class Tokenizer:
    """Text to ids and back, as the model was trained. Safe to use from several threads.

    Special tokens are recognised only where they may be: never inside ordinary text or the content of a message, so a
    client can't forge a turn by writing the token that ends one.
    """

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        try:
            self._encoder = tokenizers.Tokenizer.from_str(card.tokenizer)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"model {card.model}: the tokenizer can't be read: {error}") from error
        self._encoder.encode_special_tokens = True  # "as text": this splits specials out itself, see `_pieces`
        self._encoder.no_padding()
        self._encoder.no_truncation()
        layout = json.loads(card.tokenizer)
        self._decoder_steps = _steps(layout.get("decoder"))
        self._kinds = {step.get("type") for step in self._decoder_steps}
        self._added: dict[int, str] = {t["id"]: t["content"] for t in layout.get("added_tokens", [])}
        self._specials = {t["content"]: t for t in layout.get("added_tokens", []) if t.get("special")}
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for: of all it takes a third of a second
        self._special_ids = frozenset(t["id"] for t in self._specials.values())
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        )
        self._template = ChatTemplate(card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """A prompt's ids, with BOS before and EOS after it if the card asks for them. `special`: recognise special
        tokens in it."""
        ids = self._encode_special(text) if special else self._encode_plain(text)
        if self.card.add_bos and self.card.bos_id is not None and ids[:1] != [self.card.bos_id]:
            ids.insert(0, self.card.bos_id)
        if self.card.add_eos and ids[-1:] != [self.card.eos_ids[0]]:
            ids.append(self.card.eos_ids[0])
        return ids

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        options: ChatOptions = PLAIN,
    ) -> list[int]:
        """The ids of a conversation. Raises `TemplateError` (a ValueError) when the template refuses it or fails."""
        rendered = self._template.render(messages, tools=tools, options=options, guarded=self._special_pattern)
        return self._encode_special(rendered.text, rendered.marker, self._own)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of the ids. Bytes that aren't UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; empty for an id outside the vocabulary (padding rows of the output layer)."""
        found = self._bytes.get(token)
        if found is None:
            text = self._encoder.id_to_token(token) if 0 <= token < 1 << 32 else None
            if text is None:
                return b""
            found = self._bytes[token] = text.encode() if token in self._added else self._to_bytes(text)
        return found

    def pieces(self, text: str) -> list[int]:
        """The ids of a text in the middle of another: nothing added, nothing special."""
        return self._encode_plain(text)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    @cached_property
    def strips_first_space(self) -> bool:
        """SentencePiece and WordPiece models write a space before the first word that isn't in the text."""
        return "WordPiece" in self._kinds or any(
            step.get("type") == "Strip" and step.get("content") == " " for step in self._decoder_steps
        )

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_special(self, text: str, marker: str = "", known: Mapping[str, list[int]] = _NONE) -> list[int]:
        """Encode with special tokens recognised. `marker` is a character that guards the client's text from that;
        `known` are the ids of pieces that stand between special tokens."""
        ids: list[int] = []
        for part in self._parts(text, marker):
            if isinstance(part, int):
                ids.append(part)
            else:
                found = known.get(part)
                ids += self._encode_plain(part) if found is None else found
        return ids

    def _parts(self, text: str, marker: str = "") -> Iterator[int | str]:
        """The ids of special tokens, and the text between them: nothing of it depends on what is around it."""
        pieces = self._special_pattern.split(text) if self._special_pattern is not None else [text]
        for at, piece in enumerate(pieces):
            if at % 2:
                yield self._specials[piece]["id"]
                continue
            if at and self._specials[pieces[at - 1]].get("rstrip"):
                piece = piece.lstrip()
            if at + 1 < len(pieces) and self._specials[pieces[at + 1]].get("lstrip"):
                piece = piece.rstrip()
            if marker:
                piece = piece.replace(marker, "")
            if piece:
                yield piece

    @cached_property
    def _own(self) -> dict[str, list[int]]:
        """The ids of pieces that hold nothing but what the chat template itself writes. Nothing of any client is kept:
        how long an answer takes would tell that somebody has said the same."""
        own: dict[str, list[int]] = {}
        for roles in _PROBES:
            messages = [{"role": role, "content": _PROBE} for role in roles]
            try:
                text = self._template.render(messages, guarded=self._special_pattern).text
            except TemplateError:
                continue
            pieces = (p for p in self._parts(text) if isinstance(p, str) and _PROBE not in p)
            own |= {piece: self._encode_plain(piece) for piece in pieces}
        return own

    @cached_property
    def _to_bytes(self) -> Callable[[str], bytes]:
        if "ByteLevel" in self._kinds:
            return _byte_level
        return _word_piece if "WordPiece" in self._kinds else _sentence_piece


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTES = _byte_alphabet()
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[c] for c in token])
    except KeyError:  # not written in the byte alphabet: stands for itself
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _HEX_BYTE.match(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace("\u2581", " ").encode()


def _word_piece(token: str) -> bytes:
    """BERT's: `##` goes on with the word, anything else begins one."""
    return token[2:].encode() if token.startswith("##") and len(token) > 2 else f" {token}".encode()
