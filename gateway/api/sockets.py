"""The WebSocket `/v1/stream`: many requests on one socket, each admitted, metered and billed as over HTTP.

Close codes: 1001 the server goes away · 1009 a message is too large · 1011 a fault of ours · 4400 a message that is no
JSON object of a known type · 4401 no key, or a wrong one · 4403 the page's origin may not use this API · 4408 no key in
time.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import orjson
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.http.request import validate_host
from redis.exceptions import RedisError

from gateway.admission.admission import Arrival
from gateway.api.answer import Answer
from gateway.api.embeddings import VectorAnswer, embedding_order
from gateway.api.generate import chat_order, completion_order
from gateway.api.handler import arrival_of, new_request_id
from gateway.api.parse import parse
from gateway.api.schemas.chat import ChatRequest
from gateway.api.schemas.completion import CompletionRequest
from gateway.api.schemas.embedding import EmbeddingRequest
from gateway.dispatch.redis import queue_error
from gateway.errors import ApiError
from gateway.plane import current

__all__ = ["StreamConsumer", "UnknownSocket"]

log = logging.getLogger(__name__)

AUTH_WAIT_S = 10.0
MAX_OPEN = 256
"""Requests open at once on one socket; the tenant's own limits come on top."""
Id = Annotated[str, msgspec.Meta(max_length=256)]
"""Of the client's choice; every event of the request repeats it."""


class Auth(msgspec.Struct, tag_field="type", tag="auth"):
    key: str


class Ask(msgspec.Struct, tag_field="type", tag="request"):
    """`path` is the route that the same body would be posted to."""

    id: Id
    path: str
    body: msgspec.Raw
    resumable: bool = False
    """It outlives this socket by a minute, for any other to go on with."""


class Resume(msgspec.Struct, tag_field="type", tag="resume"):
    """`request` goes on here, under this `id`, from the chunk of that index."""

    id: Id
    request: str
    start: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="from", default=0)


class Kept(msgspec.Struct):
    """What is kept of a resumable request, for the gateway that goes on with it."""

    path: str
    body: str
    received_ms: int
    client_request_id: str


class Cancel(msgspec.Struct, tag_field="type", tag="cancel"):
    id: Id


_decoder = msgspec.json.Decoder(Auth | Ask | Resume | Cancel)
_ROUTES: dict[str, tuple[type[Any], Callable[..., Awaitable[Any]]]] = {
    "/v1/chat/completions": (ChatRequest, chat_order),
    "/v1/completions": (CompletionRequest, completion_order),
    "/v1/embeddings": (EmbeddingRequest, embedding_order),
}


class StreamConsumer(AsyncWebsocketConsumer):
    """One socket. Its requests are tasks; they end with it."""

    channel_layer_alias = None  # tokens never pass through a channel layer: it drops silently over capacity

    async def connect(self) -> None:
        self.arrival: Arrival = arrival_of(self.scope)
        self.open: dict[Id, asyncio.Task[None]] = {}
        self.stopped: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
        self.sending = asyncio.Lock()
        self.waiting: asyncio.TimerHandle | None = None
        await self.accept()
        if not _origin_allowed(dict(self.scope["headers"]).get(b"origin")):
            await self.close(4403)
        elif self.arrival.authorization is not None:
            await self._authenticate(self.arrival.authorization)
        else:
            self.waiting = asyncio.get_running_loop().call_later(AUTH_WAIT_S, self._too_late)

    async def disconnect(self, code: int) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
        tasks = list(self.open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        raw = text_data.encode("utf-8", "surrogatepass") if text_data is not None else bytes_data or b""
        if len(raw) > settings.SLUICE_MAX_BODY_BYTES:
            await self.close(1009)
            return
        try:
            message = _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            await self._say({"type": "error", "error": ApiError("invalid_json", f"{error}.").body()["error"]})
            await self.close(4400)
            return
        match message:
            case Auth():
                await self._authenticate(f"Bearer {message.key}")
            case Ask() | Resume():
                await self._ask(message)
            case Cancel():
                if (task := self.open.get(message.id)) is not None:
                    self.stopped.add(task)
                    task.cancel()

    # -- identity -----------------------------------------------------------------------------------------------------

    async def _authenticate(self, authorization: str) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
        self.arrival.authorization = authorization
        try:
            await current().admission.identify(self.arrival, "inference")
        except ApiError as error:
            current().admission.refused(self.arrival, error)
            await self._say({"type": "error", "error": error.body()["error"]})
            await self.close(4401)
            return
        await self._say({"type": "ready", "max_open": MAX_OPEN})

    def _too_late(self) -> None:
        current().dispatcher.spawn(self.close(4408))

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _ask(self, message: Ask | Resume) -> None:
        if self.arrival.principal is None:
            await self.close(4401)
        elif message.id in self.open:
            await self._fail(message.id, ApiError("invalid_value", "This id is still in use.", param="id"))
        elif len(self.open) >= MAX_OPEN:
            await self._fail(message.id, ApiError("concurrency_limit", "Too many requests are open on this socket."))
        else:
            task = self.open[message.id] = asyncio.create_task(self._run(message))
            task.add_done_callback(lambda _: self.open.pop(message.id, None))

    async def _run(self, message: Ask | Resume) -> None:
        """One request from its message to its last event."""
        arrival = Arrival(
            request=new_request_id(),
            received=time.monotonic(),
            received_ms=int(time.time() * 1000),
            address=self.arrival.address,
            authorization=self.arrival.authorization,
            client_request_id=message.id[:128] if message.id.isascii() and message.id.isprintable() else "",
        )
        try:
            await (self._answer if isinstance(message, Ask) else self._resume)(message, arrival)  # type: ignore[arg-type]
        except ApiError as error:
            if not arrival.admitted:
                current().admission.refused(arrival, error)
            await self._fail(message.id, error, arrival.request)
        except RedisError as error:
            away = queue_error(f"request {arrival.request}", error)
            if not arrival.admitted:
                current().admission.refused(arrival, away)
            await self._fail(message.id, away, arrival.request)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("request %s", arrival.request)
            await self._fail(
                message.id, ApiError("internal_error", "The server had an error; try again."), arrival.request
            )

    async def _answer(self, message: Ask, arrival: Arrival) -> None:
        plane = current()
        # Again for every request: a revoked key stops working on an open socket too.
        principal = await plane.admission.identify(arrival, "inference")
        if message.path not in _ROUTES:
            raise ApiError("not_found", f"'path' is one of {', '.join(_ROUTES)}.", param="path")
        kind, order_of = _ROUTES[message.path]
        body = await parse(plane, bytes(message.body), kind)
        order, wish = await order_of(plane, arrival, principal, body)
        if message.resumable:
            if not order.stream:
                raise ApiError("invalid_value", "Only a stream can be resumable.", param="resumable")
            kept = Kept(message.path, bytes(message.body).decode(), arrival.received_ms, arrival.client_request_id)
            order = replace(order, ask=msgspec.json.encode(kept).decode())
        ticket = await plane.admission.admit(arrival, principal, order)
        answer = (VectorAnswer if order.kind == "embedding" else Answer)(ticket, wish, plane.dispatcher)
        await self._give(message.id, answer)

    async def _resume(self, message: Resume, arrival: Arrival) -> None:
        """Go on with a request of this tenant, whichever gateway or socket had it."""
        plane = current()
        principal = await plane.admission.identify(arrival, "inference")
        try:
            asked = await plane.dispatcher.asked(message.request, principal.tenant)
        except (RedisError, OSError) as error:
            raise queue_error(f"resumption of {message.request}", error) from None
        if asked is None:
            raise ApiError("resume_unknown", "There is no such request to go on with, or no more.", param="request")
        kept = msgspec.json.decode(asked, type=Kept)
        arrival.request, arrival.client_request_id = message.request, kept.client_request_id
        arrival.received -= max(0, arrival.received_ms - kept.received_ms) / 1000
        arrival.received_ms = kept.received_ms
        kind, order_of = _ROUTES[kept.path]
        body = await parse(plane, kept.body.encode(), kind)
        order, wish = await order_of(plane, arrival, principal, body)
        ticket = await plane.admission.adopt(arrival, principal, replace(order, ask=asked))
        ticket.flight.had = message.start
        await self._give(message.id, Answer(ticket, wish, plane.dispatcher), message.start)

    async def _give(self, name: Id, answer: Answer, start: int = 0) -> None:
        """An admitted request's answer, to its end."""
        flight, dispatcher = answer.ticket.flight, current().dispatcher
        try:
            await self._say({"type": "accepted", "id": name, "request": flight.route.request})
            if answer.ticket.order.stream:
                complete = await self._stream(name, answer, start)
            else:
                await self._event(name, b"response", await answer.whole())
                complete = True
        except BaseException as error:
            wanted = asyncio.current_task() in self.stopped or isinstance(error, ApiError)
            if flight.resumable and not (wanted or flight.ended or flight.stopping):
                dispatcher.spawn(dispatcher.park(flight))
            else:
                answer.close(error)
            raise
        finally:
            if flight.resumable and flight.ended:
                dispatcher.spawn(dispatcher.told(flight))
        if complete:
            await self._say({"type": "done", "id": name})

    async def _stream(self, name: Id, answer: Answer, start: int) -> bool:
        """The events that a client over HTTP would read, one message each. False: the last one was an error."""
        first, index, resumable = await answer.first(None), 0, answer.ticket.flight.resumable
        async for frames in answer.events(first):
            for frame in frames.split(b"\n\n"):
                data = frame.removeprefix(b"data: ")
                if data.startswith(b'{"error"'):
                    failed = orjson.loads(data) | {"type": "error", "id": name}
                    await self._say(failed)
                    return False
                if data.startswith(b"{"):
                    if index >= start:
                        await self._event(name, b"chunk", data, index if resumable else None)
                    index += 1
        return True

    # -- messages -----------------------------------------------------------------------------------------------------

    async def _event(self, name: Id, kind: bytes, data: bytes, index: int | None = None) -> None:
        place = b"" if index is None else b'"index":%d,' % index
        await self._send(b'{"type":"%b","id":%b,%b"data":%b}' % (kind, orjson.dumps(name), place, data))

    async def _fail(self, name: Id, error: ApiError, request: str | None = None) -> None:
        facts: dict[str, Any] = {"type": "error", "id": name, "request": request, **error.body()}
        facts["retry_after_s"] = error.retry_after_s
        await self._say(facts)

    async def _say(self, message: dict[str, Any]) -> None:
        await self._send(orjson.dumps(message))

    async def _send(self, message: bytes) -> None:
        # A full send buffer holds up the requests of this socket alone; each has its own bound.
        async with self.sending:
            await self.send(text_data=message.decode())


class UnknownSocket(AsyncWebsocketConsumer):
    """Any other path: the handshake is refused."""

    channel_layer_alias = None

    async def connect(self) -> None:
        await self.close()


def _origin_allowed(origin: bytes | None) -> bool:
    """Only browsers send an origin: it must be one of our own hosts or a trusted one."""
    if origin is None:
        return True
    text = origin.decode("latin-1")
    host = urlsplit(text).hostname or ""
    return text in settings.CSRF_TRUSTED_ORIGINS or (bool(host) and validate_host(host, settings.ALLOWED_HOSTS))
