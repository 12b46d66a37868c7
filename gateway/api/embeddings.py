"""`POST /v1/embeddings`: texts in, vectors out, through the same admission, queue, metering and billing as all else."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace

import numpy
import orjson
from django.http import HttpResponseBase

from engine.protocol.messages import ModelCard, Sampling
from gateway.admission.admission import Arrival, Order, Replay, Ticket, limit_headers
from gateway.api.answer import Answer, Wish
from gateway.api.generate import check_capability
from gateway.api.handler import DataRequest
from gateway.api.idempotency import claim_of, replay
from gateway.api.parse import parse_body
from gateway.api.responses import raw_json
from gateway.api.schemas.common import invalid
from gateway.api.schemas.embedding import MAX_TOKENS, EmbeddingRequest
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.plane import Plane, current
from tenants.principals import Principal

__all__ = ["VectorAnswer", "answer_whole", "embedding_order", "embeddings"]

_AT_ONCE = 64
"""Vectors written as JSON before other requests of this process have their turn: about 2 ms."""


async def embeddings(request: DataRequest) -> HttpResponseBase:
    plane = current()
    principal = await plane.admission.identify(request.arrival, "inference")
    body = await parse_body(plane, request, EmbeddingRequest)
    order, wish = await embedding_order(plane, request.arrival, principal, body)
    order = replace(order, claim=claim_of(request))
    return await answer_whole(plane, request, principal, order, lambda t: VectorAnswer(t, wish, plane.dispatcher))


async def answer_whole(
    plane: Plane, request: DataRequest, principal: Principal, order: Order, answer_of: Callable[[Ticket], VectorAnswer]
) -> HttpResponseBase:
    """Admit, then answer in one piece. Whatever ends it early, `Answer.close` is reached."""
    try:
        ticket = await plane.admission.admit(request.arrival, principal, order)
    except Replay as earlier:
        return await replay(plane.dispatcher.redis, plane.dispatcher.keys, earlier.request)
    answer = answer_of(ticket)
    try:
        whole = await answer.whole()
    except BaseException as error:
        answer.close(error)
        if isinstance(error, ApiError) and error.code == "invalid_image":  # the engine knows no names of fields
            error.param = order.param
        raise
    headers = {**limit_headers(ticket.verdict), "server-timing": answer.timing(ended=True)}
    return raw_json(whole, headers=headers)


async def embedding_order(
    plane: Plane, arrival: Arrival, principal: Principal, body: EmbeddingRequest
) -> tuple[Order, Wish]:
    """A checked embedding request as what admission takes."""
    model = await plane.admission.find_model(arrival, principal, body.model)
    check_capability(model, "embedding")
    _check_dimensions(body.dimensions, model.card)
    prompts = await plane.prompts.embedding(model.card, body.inputs())
    tokens = sum(len(prompt) for prompt in prompts)
    if tokens > MAX_TOKENS:
        raise invalid("input", f"'input' holds at most {MAX_TOKENS} tokens in all, not {tokens}; send fewer at once.")
    order = Order(
        kind="embedding",
        model=model,
        prompts=prompts,
        sampling=Sampling(max_tokens=0),
        param="input",
        service_tier=body.service_tier,
        deadline_ms=body.deadline_ms,
    )
    return order, Wish(False, base64=body.encoding_format == "base64")


def _check_dimensions(wanted: int | None, card: ModelCard) -> None:
    """A vector may only be cut where the model was trained for that, and no card says so yet."""
    if wanted is not None and wanted != card.embedding_dimensions:
        raise ApiError(
            "unsupported_value",
            f"The vectors of '{card.model}' have {card.embedding_dimensions} dimensions and can't be cut to {wanted}.",
            param="dimensions",
        )


class VectorAnswer(Answer):
    """An answer of one vector per input, in one piece. How it ends is `Answer`'s business."""

    def __init__(self, ticket: Ticket, wish: Wish, dispatcher: Dispatcher) -> None:
        super().__init__(ticket, wish, dispatcher)
        # Here and not in `_collect`: when the client leaves in its middle, `close` has the answer made for its claim.
        self._vectors = [b""] * ticket.order.choices

    async def whole(self) -> bytes:
        vectors = await self._collect(self.ticket.order.model.card.embedding_dimensions)
        self._flight.delivered(0)
        parts: list[bytes] = []
        for index, vector in enumerate(vectors):
            if index and index % _AT_ONCE == 0:
                await asyncio.sleep(0)
            parts.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, self._written(vector)))
        prompt = self.ticket.order.prompt_tokens
        rest = orjson.dumps(
            {"model": self.ticket.order.model.card.model, "usage": {"prompt_tokens": prompt, "total_tokens": prompt}}
        )
        body = b'{"object":"list","data":[%b],%b' % (b",".join(parts), rest[1:])
        await self._finished("application/json", [body])
        return body

    async def _collect(self, length: int) -> list[bytes]:
        """The vectors as little-endian float32, by input; the engine may finish them in any order."""
        while batch := await self._flight.reply.get():
            for delta in batch:
                self._vectors[delta.choice] = delta.vector
        if any(len(vector) != 4 * length for vector in self._vectors):
            raise ApiError("engine_error", "The engine sent a vector of another size than its model has.")
        return self._vectors

    def _written(self, vector: bytes) -> bytes:
        if self._wish.base64:
            return b'"%b"' % b64encode(vector)
        # The shortest digits that give the same float32, where Python's own floats would be written with 17.
        return orjson.dumps(numpy.frombuffer(vector, "<f4"), option=orjson.OPT_SERIALIZE_NUMPY)
