"""`POST /v1/classify`: images in, classes out, through the same admission, queue, metering and billing as all else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any, TypeVar

import numpy
import orjson
from django.http import HttpResponseBase

from engine.protocol.messages import ModelCard, Sampling
from gateway.admission.admission import Arrival, Order, Ticket
from gateway.api.answer import Wish
from gateway.api.embeddings import VectorAnswer, answer_whole
from gateway.api.generate import check_capability
from gateway.api.handler import DataRequest
from gateway.api.idempotency import claim_of
from gateway.api.parse import parse_body
from gateway.api.schemas.classify import ClassifyRequest
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.plane import Plane, current
from tenants.principals import Principal

__all__ = ["Carried", "ClassAnswer", "Load", "classify"]

T = TypeVar("T")

_TOP = 5
_AT_ONCE = 8
"""Images whose classes are written before others of this process have their turn: of 1000 classes each, about 2 ms."""


class Load:
    """Bytes of bodies with images that this process holds, from before they are read as JSON. The queue's own bounds
    count requests, which are small but for these."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._all = 0
        self._of: dict[str, int] = {}

    @contextlib.contextmanager
    def carry(self, tenant: str, count: int) -> Iterator[Carried]:
        """For as long as the request is open, and what was begun for it goes on. Raises `ApiError`, as a full queue
        does, and nothing is carried."""
        mine = self._of.get(tenant, 0)
        if mine + count > self._most_of_one:
            raise ApiError("tenant_queue_full", "You have too many images waiting.", retry_after_s=1)
        if self._all + count > self._most:
            raise ApiError("tier_queue_full", "Too many images are waiting.", retry_after_s=1)
        self._all, self._of[tenant] = self._all + count, mine + count
        carried = Carried(lambda: self._drop(tenant, count))
        try:
            yield carried
        finally:
            carried.let_go()

    def _drop(self, tenant: str, count: int) -> None:
        self._all, left = self._all - count, self._of[tenant] - count
        if left:
            self._of[tenant] = left
        else:
            del self._of[tenant]


class Carried:
    """The bytes of one request. A client that leaves ends its request at once, but neither a thread that reads them nor
    an admission that was sent: they count until the last of these is done."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop
        self._holders = 1

    def until(self, work: asyncio.Future[Any]) -> None:
        """They are in memory until `work` is done, whoever waits for it."""
        self._holders += 1
        work.add_done_callback(lambda _: self.let_go())

    async def through(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. It goes on when the client leaves, since its thread would too."""
        task = asyncio.create_task(work)
        self.until(task)
        return await asyncio.shield(task)

    def let_go(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._drop()


_load = Load(256 << 20, 64 << 20)


async def classify(request: DataRequest) -> HttpResponseBase:
    plane = current()
    principal = await plane.admission.identify(request.arrival, "inference")
    with _load.carry(principal.tenant, len(request.raw)) as carried:
        body: ClassifyRequest = await carried.through(parse_body(plane, request, ClassifyRequest))
        order = await _order(plane, request.arrival, principal, body, carried)
        order = replace(order, claim=claim_of(request), watch=carried.until)
        top_k = body.top_k
        # For as long as it waits one copy of the images is enough.
        del body
        request.raw, request._stream = b"", BytesIO()
        return await answer_whole(
            plane, request, principal, order, lambda ticket: ClassAnswer(ticket, top_k, plane.dispatcher)
        )


async def _order(
    plane: Plane, arrival: Arrival, principal: Principal, body: ClassifyRequest, carried: Carried
) -> Order:
    """A checked request as what admission takes: a placeholder for each token that an image costs."""
    model = await plane.admission.find_model(arrival, principal, body.model)
    check_capability(model, "image")
    _check_top(body.top_k, model.card)
    images = await carried.through(plane.prompts.off_loop(body.images))
    return Order(
        kind="image",
        model=model,
        prompts=((0,) * model.card.image_tokens,) * len(images),
        sampling=Sampling(max_tokens=0),
        param="input",
        images=images,
        service_tier=body.service_tier,
        deadline_ms=body.deadline_ms,
    )


def _check_top(wanted: int | None, card: ModelCard) -> None:
    if wanted is not None and wanted > len(card.labels):
        raise ApiError("invalid_value", f"'{card.model}' has {len(card.labels)} classes.", param="top_k")


class ClassAnswer(VectorAnswer):
    """An answer of the likeliest classes of each image, in one piece. Without `top_k` also the scores of all, as vLLM
    answers."""

    def __init__(self, ticket: Ticket, top_k: int | None, dispatcher: Dispatcher) -> None:
        super().__init__(ticket, Wish(False), dispatcher)
        self._all_scores = top_k is None
        self._labels = ticket.order.model.card.labels
        self._count_top = min(top_k or _TOP, len(self._labels))

    async def whole(self) -> bytes:
        vectors = await self._collect(len(self._labels))
        self._flight.delivered(0)
        parts: list[bytes] = []
        for index, vector in enumerate(vectors):
            if index and index % _AT_ONCE == 0:
                await asyncio.sleep(0)
            parts.append(self._one(index, numpy.frombuffer(vector, "<f4")))
        prompt = self.ticket.order.prompt_tokens
        head = {
            "id": f"classify-{self._flight.route.request}",
            "object": "list",
            "created": self._created,
            "model": self.ticket.order.model.card.model,
            "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
        }
        body = b'%b,"data":[%b]}' % (orjson.dumps(head)[:-1], b",".join(parts))
        await self._finished("application/json", [body])
        return body

    def _one(self, index: int, scores: numpy.ndarray) -> bytes:
        best = numpy.argsort(-scores, kind="stable")[: self._count_top]
        found = {
            "index": index,
            "label": self._labels[best[0]],
            "score": scores[best[0]],
            "num_classes": len(self._labels),
            "top": [{"index": int(k), "label": self._labels[k], "score": scores[k]} for k in best],
        }
        if self._all_scores:
            found["probs"] = scores
        return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)
