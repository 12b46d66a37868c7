"""An admitted request as what its client gets: one JSON object, or a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from engine.protocol.messages import Delta, TokenLogprob
from gateway.admission.admission import Ticket
from gateway.api.calls import CallReader
from gateway.api.frames import (
    DONE,
    KEEP_ALIVE,
    ChatFrames,
    CompletionFrames,
    Usage,
    chat_logprobs,
    completion_logprobs,
    error_frame,
)
from gateway.api.idempotency import keep as keep_result
from gateway.api.protocol import Lane
from gateway.api.responses import EventStream
from gateway.api.schemas.tools import Calling
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from tenants.billing.rating import charge

__all__ = ["EVENT_STREAM", "Answer", "Wish"]

EVENT_STREAM = "text/event-stream; charset=utf-8"
KEEP_ALIVE_S = 10.0
"""Silence on a stream after which a comment is sent, so that proxies don't take it for dead."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How the client wants its answer. `echoes`: by choice, text to put before the model's (empty: none)."""

    chat: bool
    include_usage: bool = False
    logprobs: bool = False
    tier: str | None = None
    echoes: Sequence[str] = ()
    base64: bool = False
    """Vectors as base64 of little-endian float32 instead of numbers."""
    calls: Calling | None = None
    """Tools that the answer may call."""
    bare: bool = False
    """A call may come without its marks."""
    best: int = 0
    """How many answers to each prompt are shown, those with the highest log-probability per token; 0: all."""


@dataclass(slots=True)
class _Choice:
    """What has been received of one choice."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    started: bool = False
    reader: CallReader | None = None
    length: int = 0
    """Characters sent so far."""

    def doubt(self) -> float:
        """How unlikely the model finds its tokens on average, in nats."""
        return -sum(token.logprob for token in self.logprobs) / max(1, len(self.logprobs))


class Answer:
    """Owns the client's side of a flight: every exit path ends in `close`, which leaves exactly one outcome."""

    def __init__(self, ticket: Ticket, wish: Wish, dispatcher: Dispatcher) -> None:
        self.ticket, self._wish, self._dispatcher = ticket, wish, dispatcher
        # The tier it really runs in, said only to those who asked for one.
        self._tier = ticket.tier.name if wish.tier is not None else None
        self._flight = ticket.flight
        self._choices = [_Choice(reader=self._reader(i)) for i in range(ticket.order.choices)]
        # Whichever gateway goes on with a request makes the same events.
        self._created = ticket.flight.received_ms // 1000
        # The same weights, tokenizer and template: with a seed, the same text.
        self._fingerprint = f"fp_{ticket.order.model.card.hash[:12]}"
        prefix = "chatcmpl" if wish.chat else "cmpl"
        self.kept: list[bytes] = []
        self._unsent = 0
        """Tokens whose text was held back."""
        self._early = 0
        """Deltas that were encoded as they came and that the reply still has, for the task that was woken."""
        self._id = f"{prefix}-{ticket.flight.route.request}"

    async def first(self, wait_s: float | None, stream: EventStream | None = None) -> list[Delta]:
        """Wait for the first deltas, so that an error keeps its status; empty when they take longer than `wait_s`, or
        when all of them went out with the head of `stream`."""
        reply = self._flight.reply
        if stream is not None:
            reply.sink = self._opener(stream)
        try:
            return self._rest(await reply.get(wait_s))
        finally:
            reply.sink = None

    def _opener(self, stream: EventStream) -> Callable[[list[Delta]], bool]:
        """Sends the first deltas as they come; the task is woken all the same, to go on from there."""
        frames = self._frames  # made while there is nothing to send

        def sink(batch: list[Delta]) -> bool:
            if stream.prepared:
                self._early = len(batch)
                if sent := self._encode(frames, batch):
                    stream.begin(self.timing(ended=False), sent)
                    if self.ticket.order.claim is not None:
                        self.kept.append(sent)
            return False

        return sink

    def _rest(self, batch: list[Delta]) -> list[Delta]:
        """What is not encoded yet of the first deltas that the reply gives."""
        early, self._early = self._early, 0
        return batch[early:]

    async def whole(self) -> bytes:
        """The complete answer, as JSON."""
        reply = self._flight.reply
        while batch := await reply.get():
            tokens = 0
            for delta in batch:
                choice = self._choices[delta.choice]
                tokens += self._count(choice, delta)
                text = delta.text
                if choice.reader is not None:
                    text, _ = choice.reader.push(text)
                    if delta.finish is not None:
                        text += choice.reader.flush()
                if text:
                    choice.texts.append(text)
                choice.logprobs.extend(delta.logprobs)
            self._flight.delivered(tokens)
        body = orjson.dumps(self._object())
        await self._finished("application/json", [body])
        return body

    async def events(self, batch: list[Delta], lane: Lane | None = None) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; what fails after the first byte is said in the last one. What `lane` takes
        is not yielded any more."""
        self._flight.consumer = asyncio.current_task()
        reply, frames = self._flight.reply, self._frames
        keep = self.ticket.order.claim is not None
        if lane is not None:
            reply.sink = self._sink(frames, lane, keep)
        try:
            quiet = not batch and not any(c.tokens for c in self._choices)
            while True:
                sent = self._encode(frames, batch) if batch else KEEP_ALIVE if quiet and not reply.ended else b""
                if sent:
                    if keep and batch:
                        self.kept.append(sent)
                    yield sent
                batch = await reply.get(KEEP_ALIVE_S)
                quiet = not batch
                if not batch and reply.ended:  # asked after the end: nothing waits any more
                    break
        except ApiError as error:
            self._failed(200, error)
            yield error_frame(error)
            return
        finally:
            reply.sink = None
        last = self._last(frames)
        self.kept.append(last)
        await self._finished(EVENT_STREAM, self.kept)
        yield last

    def _sink(self, frames: ChatFrames | CompletionFrames, lane: Lane, keep: bool) -> Callable[[list[Delta]], bool]:
        """Sends deltas that come while `events` waits for them, without waking its task for each."""

        def sink(batch: list[Delta]) -> bool:
            if not lane.open:
                return False
            if sent := self._encode(frames, batch):
                if keep:
                    self.kept.append(sent)
                lane.write(sent)
            return True

        return sink

    def close(self, error: BaseException | None = None) -> None:
        """The client's side is over. If it ended early the engine is told, and the outcome says so."""
        flight = self._flight
        if flight.ended:
            return
        if isinstance(error, ApiError):
            self._failed(error.status, error)
        else:
            slow = flight.stopping and flight.reply.ended
            if self.ticket.order.claim is not None and flight.reply.complete:
                self._dispatcher.spawn(self._keep_rest())
            self._dispatcher.abandon(flight, "client_disconnected")
            flight.end(499, "abort", "slow_client" if slow else "client_disconnected")

    def timing(self, ended: bool) -> str:
        """`Server-Timing` of what is known so far: durations in milliseconds, cached tokens, at the end the cost."""
        reply, flight = self._flight.reply, self._flight
        parts = []
        if reply.queued_s is not None:
            parts.append(f"queue;dur={reply.queued_s * 1000:.1f}")
        if reply.prefill_s is not None:
            parts.append(f"prefill;dur={reply.prefill_s * 1000:.1f}")
        if ended and flight.first_received is not None and flight.last_received is not None:
            parts.append(f"decode;dur={(flight.last_received - flight.first_received) * 1000:.1f}")
        parts.append(f'cached;desc="{reply.cached_tokens} tokens"')
        price = self.ticket.price
        if ended and price is not None:
            made = sum(c.tokens for c in self._choices)
            cost = charge(price, self.ticket.order.prompt_tokens, reply.cached_tokens, made)
            parts.append(f'cost;desc="{cost.normalize():f} {price.currency}"')
        return ", ".join(parts)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _count(self, choice: _Choice, delta: Delta) -> int:
        new = len(delta.tokens)
        choice.tokens += new
        if delta.finish is not None:
            choice.finish = delta.finish
        return new

    def _reader(self, choice: int) -> CallReader | None:
        calls = self._wish.calls
        if calls is None:
            return None
        seed = f"{self._flight.route.request}:{choice}"
        return CallReader(calls.names, bare=self._wish.bare, many=calls.many, seed=seed)

    def _finish(self, choice: _Choice) -> str:
        """A model that ended by itself after calling a tool waits for the tool."""
        called = choice.reader is not None and choice.reader.calls
        return "tool_calls" if called and choice.finish == "stop" else choice.finish or "stop"

    @cached_property
    def _frames(self) -> ChatFrames | CompletionFrames:
        kind = ChatFrames if self._wish.chat else CompletionFrames
        model = self.ticket.order.model.card.model
        return kind(self._id, self._created, model, self._fingerprint, self._tier, self._wish.include_usage)

    def _encode(self, frames: ChatFrames | CompletionFrames, batch: list[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in batch:
            choice = self._choices[delta.choice]
            self._unsent += self._count(choice, delta)
            text = delta.text
            if not choice.started and self._wish.echoes:
                text = self._wish.echoes[delta.choice] + text
            if delta.logprobs:
                choice.logprobs.extend(delta.logprobs)
            calls: list[dict[str, Any]] = []
            if choice.reader is not None:
                text, calls = choice.reader.push(text)
                if delta.finish is not None:
                    text += choice.reader.flush()
            # Log-probabilities of tokens whose text is still held back wait for it.
            if text or (choice.logprobs and delta.finish is not None and not calls):
                parts.append(frames.text(delta.choice, text, self._take_logprobs(frames, choice), not choice.started))
                choice.started = True
                choice.length += len(text)
            if calls and isinstance(frames, ChatFrames):
                logprobs = self._take_logprobs(frames, choice)
                parts.append(frames.calls(delta.choice, calls, logprobs, not choice.started))
                choice.started = True
            if delta.finish is not None:
                parts.append(frames.end(delta.choice, self._finish(choice), not choice.started))
                choice.started = True
        if parts:
            self._flight.delivered(self._unsent)
            self._unsent = 0
        return b"".join(parts)

    def _take_logprobs(self, frames: ChatFrames | CompletionFrames, choice: _Choice) -> bytes:
        if not choice.logprobs:
            return b"null"
        taken, choice.logprobs = choice.logprobs, []
        return frames.logprobs(taken, choice.length)

    def _last(self, frames: ChatFrames | CompletionFrames) -> bytes:
        return (frames.usage(self._usage()) if self._wish.include_usage else b"") + DONE

    async def _keep_rest(self) -> None:
        """The client left after the engine was done: its Idempotency-Key still finds the whole answer."""
        if not self.ticket.order.stream:
            await self.whole()
            return
        frames = self._frames
        while batch := await self._flight.reply.get():
            self.kept.append(self._encode(frames, self._rest(batch)))
        self.kept.append(self._last(frames))
        await self._finished(EVENT_STREAM, self.kept)

    async def _finished(self, content_type: str, parts: list[bytes]) -> None:
        """All was received. What an Idempotency-Key asks for is kept before the client can see the end of it."""
        order, dispatcher = self.ticket.order, self._dispatcher
        if order.claim is not None:
            request = self._flight.route.request
            await keep_result(dispatcher.redis, dispatcher.keys, request, order.claim, content_type, b"".join(parts))
        self._flight.end(200, self._finish(self._choices[0]))

    def _failed(self, status: int, error: ApiError) -> None:
        """One choice failed, so the request did: the others are not worth computing."""
        self._dispatcher.abandon(self._flight, error.code)
        self._flight.end(status, "error", error.code)

    def _usage(self) -> Usage:
        prompt = self.ticket.order.prompt_tokens
        completion = sum(c.tokens for c in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._flight.reply.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def _object(self) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion" if self._wish.chat else "text_completion",
            "created": self._created,
            "model": self.ticket.order.model.card.model,
            "choices": [self._shape(i, c) for i, c in enumerate(self._shown())],
            "usage": self._usage(),
            "system_fingerprint": self._fingerprint,
        }
        if self._tier is not None:
            answer["service_tier"] = self._tier
        return answer

    def _shown(self) -> list[_Choice]:
        """All choices, or the best of each prompt's, the best first."""
        made = self.ticket.order.n
        if not self._wish.best:
            return self._choices
        groups = (self._choices[start : start + made] for start in range(0, len(self._choices), made))
        return [c for group in groups for c in sorted(group, key=_Choice.doubt)[: self._wish.best]]

    def _shape(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        finish = self._finish(choice)
        if self._wish.chat:
            logprobs = chat_logprobs(choice.logprobs) if self._wish.logprobs else None
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
            if choice.reader is not None and choice.reader.calls:
                message["content"] = text or None
                message["tool_calls"] = [call.whole() for call in choice.reader.calls]
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        echo = self._wish.echoes[index] if self._wish.echoes else ""
        older = completion_logprobs(choice.logprobs, len(echo)) if self._wish.logprobs else None
        return {"text": echo + text, "index": index, "logprobs": older, "finish_reason": finish}
