"""Server-sent events of a completion: bytes made from a template per request and one JSON string per delta.

Never an `id:` or `event:` line: with comments between events they break OpenAI's own clients. Every event, the last
too, ends with a blank line.
"""

from __future__ import annotations

from typing import Any

import orjson

from engine.protocol.messages import TokenLogprob
from gateway.errors import ApiError

__all__ = ["DONE", "KEEP_ALIVE", "ChatFrames", "CompletionFrames", "Usage", "error_frame"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Usage = dict[str, Any]


def error_frame(error: ApiError) -> bytes:
    """The right ending of a stream that failed after its first byte: both official clients raise on it."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


class _Frames:
    """What all chunks of one stream have in common, as bytes before and after the choice."""

    kind = ""

    def __init__(
        self, response_id: str, created: int, model: str, fingerprint: str, tier: str | None, with_usage: bool
    ) -> None:
        head: dict[str, Any] = {"id": response_id, "object": self.kind, "created": created, "model": model}
        if tier is not None:
            head["service_tier"] = tier
        head["system_fingerprint"] = fingerprint
        self._open = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        # With include_usage every chunk carries the field; it is null until the last.
        self._close = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The one chunk without choices that carries the usage."""
        return self._open + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def text(self, choice: int, text: str, logprobs: bytes, first: bool) -> bytes:
        raise NotImplementedError

    def end(self, choice: int, reason: str, first: bool) -> bytes:
        raise NotImplementedError

    def logprobs(self, tokens: list[TokenLogprob], offset: int) -> bytes:
        raise NotImplementedError


class ChatFrames(_Frames):
    """Chunks of a chat completion."""

    kind = "chat.completion.chunk"

    def text(self, choice: int, text: str, logprobs: bytes, first: bool) -> bytes:
        # The role comes with the first text, never alone: a client measures its first token by it.
        role = b'"role":"assistant","refusal":null,' if first else b""
        return b'%b{"index":%d,"delta":{%b"content":%b},"logprobs":%b,"finish_reason":null}%b' % (
            self._open,
            choice,
            role,
            orjson.dumps(text),
            logprobs,
            self._close,
        )

    def calls(self, choice: int, deltas: list[dict[str, Any]], logprobs: bytes, first: bool) -> bytes:
        """Pieces of tool calls; a call's first piece has its id and name."""
        role = b'"role":"assistant","content":null,' if first else b""
        return b'%b{"index":%d,"delta":{%b"tool_calls":%b},"logprobs":%b,"finish_reason":null}%b' % (
            self._open,
            choice,
            role,
            orjson.dumps(deltas),
            logprobs,
            self._close,
        )

    def end(self, choice: int, reason: str, first: bool) -> bytes:
        delta = b'{"role":"assistant","content":"","refusal":null}' if first else b"{}"
        return b'%b{"index":%d,"delta":%b,"logprobs":null,"finish_reason":"%b"}%b' % (
            self._open,
            choice,
            delta,
            reason.encode(),
            self._close,
        )

    def logprobs(self, tokens: list[TokenLogprob], offset: int) -> bytes:
        return orjson.dumps(chat_logprobs(tokens))


class CompletionFrames(_Frames):
    """Chunks of a text completion."""

    kind = "text_completion"

    def text(self, choice: int, text: str, logprobs: bytes, first: bool) -> bytes:
        return b'%b{"text":%b,"index":%d,"logprobs":%b,"finish_reason":null}%b' % (
            self._open,
            orjson.dumps(text),
            choice,
            logprobs,
            self._close,
        )

    def end(self, choice: int, reason: str, first: bool) -> bytes:
        return b'%b{"text":"","index":%d,"logprobs":null,"finish_reason":"%b"}%b' % (
            self._open,
            choice,
            reason.encode(),
            self._close,
        )

    def logprobs(self, tokens: list[TokenLogprob], offset: int) -> bytes:
        return orjson.dumps(completion_logprobs(tokens, offset))


def chat_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """OpenAI's shape for chat: a list of tokens, each with its alternatives."""
    return {"content": [_entry(t) for t in tokens], "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": _text(token.bytes),
        "logprob": token.logprob,
        "bytes": list(token.bytes),
        "top_logprobs": [
            {"token": _text(raw), "logprob": logprob, "bytes": list(raw)} for _, raw, logprob in token.top
        ],
    }


def completion_logprobs(tokens: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """The older shape: parallel lists. `offset` is where the first token begins in the text of its choice."""
    texts = [_text(t.bytes) for t in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [{_text(raw): logprob for _, raw, logprob in t.top} for t in tokens],
        "text_offset": offsets,
    }


def _text(raw: bytes) -> str:
    """A token's bytes may be part of a character; the exact bytes are given beside the text."""
    return raw.decode("utf-8", "replace")
