"""`admit`: from a validated request to a place in the queue, or to a refusal that consumed nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from django.db import Error as DatabaseError
from redis.exceptions import RedisError

from engine.protocol.events import Kind
from engine.protocol.functions import Admission as Facts
from engine.protocol.functions import Claim, Verdict
from engine.protocol.messages import ModelCard, Refusal, Sampling, Work, encode
from gateway.admission.identity import Identity, check_address, check_scope
from gateway.admission.prices import Prices
from gateway.admission.tiers import choose_tier
from gateway.dispatch.dispatcher import LEASE_MS, Dispatcher
from gateway.dispatch.flight import Flight, Route, Trail
from gateway.dispatch.redis import queue_error
from gateway.dispatch.registry import Model
from gateway.errors import ApiError
from tenants.billing.rating import PriceFacts, hold_nano
from tenants.principals import Principal, TierFacts

__all__ = ["Admission", "Arrival", "Order", "Replay", "Ticket"]

log = logging.getLogger(__name__)

Balance = Callable[[str], Awaitable[tuple[int, int]]]
"""A tenant's (balance in nano-units, ledger sequence), from the ledger, for when Redis has lost it."""


@dataclass(slots=True)
class Arrival:
    """A request as it came in, before anyone knows what it wants. Filled in as that becomes known."""

    request: str
    received: float
    received_ms: int
    address: str | None
    authorization: str | None
    client_request_id: str = ""
    principal: Principal | None = None
    model: str = ""
    tier: str = ""
    trace: str = ""
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for, validated and tokenised. `sampling.max_tokens` may exceed what fits: it is a cap."""

    kind: str
    model: Model
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    param: str
    """Name of the request field that holds the prompt, for errors."""
    n: int = 1
    seed: int | None = None
    service_tier: str | None = None
    stream: bool = False
    deadline_ms: int | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    claim: Claim | None = None
    ask: str = ""
    """Of a resumable request: what another gateway needs to go on with it."""
    images: tuple[bytes, ...] = ()
    """One for each prompt, which then only says what it costs."""
    watch: Callable[[asyncio.Future[Any]], None] | None = None
    """Told of what holds the images until it is done, though the client leaves: an admission that was sent."""

    def watched(self, asking: asyncio.Future[Verdict]) -> asyncio.Future[Verdict]:
        """The same, told of."""
        if self.watch is not None:
            self.watch(asking)
        return asking

    @property
    def prompt_tokens(self) -> int:
        return sum(len(p) for p in self.prompts)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class Ticket:
    """Proof of admission: the request is in the queue and `flight` receives its answer."""

    flight: Flight
    order: Order
    principal: Principal
    tier: TierFacts
    verdict: Verdict
    price: PriceFacts | None


class Replay(Exception):
    """Not admitted: an earlier request with this Idempotency-Key and body was answered already."""

    def __init__(self, request: str) -> None:
        super().__init__(request)
        self.request = request


class Admission:
    """Every route goes through `identify`; whatever computes goes through `admit`."""

    def __init__(self, dispatcher: Dispatcher, identity: Identity, prices: Prices, balance: Balance) -> None:
        self._dispatcher, self._identity, self._prices, self._balance = dispatcher, identity, prices, balance

    async def identify(self, arrival: Arrival, scope: str) -> Principal:
        """Who asks, if the key may be used from there and for that."""
        principal = arrival.principal = await self._identity.authenticate(arrival.authorization)
        check_address(principal, arrival.address)
        check_scope(principal, scope)
        return principal

    async def find_model(self, arrival: Arrival, principal: Principal, name: str) -> Model:
        """The model of that name, if this principal may use it; what it may not use does not exist for it."""
        arrival.model = name[:128]
        model = await self._dispatcher.registry.find(name)
        if model is None or not _may_use(principal, model):
            raise ApiError(
                "model_not_found",
                f"The model '{name[:128]}' does not exist or you do not have access to it.",
                param="model",
            )
        return model

    async def models(self, principal: Principal) -> list[Model]:
        """All models this principal may use."""
        return [m for m in await self._dispatcher.registry.all() if _may_use(principal, m)]

    def trail(self, arrival: Arrival) -> Trail:
        """The request's events begin."""
        dispatcher = self._dispatcher
        return Trail(dispatcher.recorder, dispatcher.gateway, arrival.request, arrival.received)

    async def admit(self, arrival: Arrival, principal: Principal, order: Order) -> Ticket:
        """Check everything, hold the money, enqueue: all or nothing. Raises `ApiError` when refused."""
        order = _fit(order)
        tier = choose_tier(principal, order.service_tier)
        arrival.tier = tier.name
        price = await self._prices.of(order.model.card.price_class)
        # Asked first and without a pause up to the wait for it: what is made of it here is made while Redis decides.
        asking = order.watched(self._ask(principal, tier, order, price, arrival))
        trail = self.trail(arrival)
        trail.tenant, trail.tier, trail.pool = principal.tenant, tier.name, order.model.pool
        trail.emit(Kind.RECEIVED, model=order.model.card.model, kind=order.kind, stream=order.stream)
        route = _route(arrival, principal, tier, order)
        flight = self._dispatcher.open(route, order.choices, order.n, trail, arrival.received, arrival.received_ms)
        flight.reply.on_overflow = lambda: self._dispatcher.abandon_slow(flight)
        try:
            verdict = await asyncio.shield(asking)
            if verdict.code == "stale_principal":
                anew = self._ask_anew(verdict, principal, tier, order, price, arrival)
                asking = order.watched(asyncio.create_task(anew))
                verdict = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The client left while Redis was deciding. A cancel sent now could overtake the admission: it waits.
            self._dispatcher.spawn(self._undo(asking, flight))
            raise
        except (ApiError, RedisError, OSError) as error:
            # Whether Redis admitted it is unknown: make sure that nothing stays behind.
            self._dispatcher.abandon(flight, "admission_interrupted")
            if isinstance(error, ApiError):
                raise
            raise queue_error(f"admission of {arrival.request}", error) from None
        if not verdict.ok:
            self._dispatcher.forget(flight)
            if verdict.code == "idempotency_replay":
                raise Replay(verdict.detail)
            raise _refusal(verdict)
        arrival.admitted, flight.admitted = True, time.monotonic()
        flight.resumable = bool(order.ask)
        trail.emit(Kind.ADMITTED, prompt_tokens=order.prompt_tokens, choices=order.choices)
        trail.emit(Kind.QUEUED, depth=verdict.depth)
        return Ticket(flight, order, principal, tier, verdict, price)

    async def adopt(self, arrival: Arrival, principal: Principal, order: Order) -> Ticket:
        """The ticket of a request that was admitted before, and is this gateway's from now on: nothing is charged."""
        dispatcher = self._dispatcher
        order = _fit(order)
        tier = choose_tier(principal, order.service_tier)
        price = await self._prices.of(order.model.card.price_class)
        adopting = asyncio.create_task(dispatcher.adopt(arrival.request, principal.tenant))
        try:
            adopted = await asyncio.shield(adopting)
        except asyncio.CancelledError:
            dispatcher.spawn(dispatcher.give_back(adopting, arrival.request))
            raise
        except (RedisError, OSError) as error:
            raise queue_error(f"adoption of {arrival.request}", error) from None
        if adopted is None:
            raise ApiError("resume_unknown", "There is no such request to go on with, or no more.", param="request")
        trail = self.trail(arrival)
        trail.tenant, trail.tier, trail.pool = principal.tenant, tier.name, order.model.pool
        route = _route(arrival, principal, tier, order)
        flight = dispatcher.open(route, order.choices, order.n, trail, arrival.received, arrival.received_ms)
        flight.reply.on_overflow = lambda: dispatcher.abandon_slow(flight)
        flight.resumable, flight.turn, flight.ended = True, adopted.turn, adopted.told
        arrival.admitted = True
        dispatcher.follow(flight)
        return Ticket(flight, order, principal, tier, Verdict("ok"), price)

    async def _undo(self, asking: asyncio.Future[Verdict], flight: Flight) -> None:
        try:
            verdict = await asking
        except (ApiError, RedisError, OSError):
            verdict = None
        if verdict is None or verdict.ok:
            self._dispatcher.abandon(flight, "client_disconnected")
            flight.end(499, "abort", "client_disconnected")
        else:
            self._dispatcher.forget(flight)

    def _ask(
        self, principal: Principal, tier: TierFacts, order: Order, price: PriceFacts | None, arrival: Arrival
    ) -> asyncio.Future[Verdict]:
        held = hold_nano(price, order.prompt_tokens, order.sampling.max_tokens, order.choices) if price else 0
        gateway = self._dispatcher.gateway
        work = encode(_work(arrival, principal, tier, order, gateway))
        return self._dispatcher.admitter.admit(_facts(principal, tier, order, arrival.request, gateway, held), work)

    async def _ask_anew(
        self,
        verdict: Verdict,
        principal: Principal,
        tier: TierFacts,
        order: Order,
        price: PriceFacts | None,
        arrival: Arrival,
    ) -> Verdict:
        """What is cached here is older than what Redis knows, or Redis knows nothing: mend that and ask again."""
        for _ in range(2):
            if verdict.detail == "balance":
                await self._restore_balance(principal)
            else:
                principal = await self._identity.refresh(principal)
            verdict = await self._ask(principal, tier, order, price, arrival)
            if verdict.code != "stale_principal":
                return verdict
        raise ApiError("identity_unavailable", "Your account is changing; try again.", retry_after_s=1)

    async def _restore_balance(self, principal: Principal) -> None:
        """Redis lost the account (it was wiped): tell it what the ledger says."""
        try:
            balance_nano, sequence = await self._balance(principal.tenant)
        except (DatabaseError, OSError):
            raise ApiError("identity_unavailable", "Your balance can't be read right now.", retry_after_s=5) from None
        await self._dispatcher.functions.account(principal.tenant, principal.generation, balance_nano, sequence)

    def refused(self, arrival: Arrival, error: ApiError) -> None:
        """Count a refusal and keep it for "explain". Nothing else does: a refused request has no usage record."""
        principal = arrival.principal
        trail = self.trail(arrival)
        if principal is not None:
            trail.tenant, trail.tier = principal.tenant, arrival.tier
        trail.emit(Kind.REFUSED, code=error.code, status=error.status, model=arrival.model)
        self._dispatcher.recorder.refusal(
            Refusal(
                request=arrival.request,
                tenant=principal.tenant if principal else "",
                key=principal.key_id if principal else "",
                tier=arrival.tier,
                model=arrival.model,
                status=error.status,
                code=error.code,
                at_ms=int(time.time() * 1000),
                detail=error.message[:200],
            )
        )


def _may_use(principal: Principal, model: Model) -> bool:
    return principal.models is None or model.card.model in principal.models or model.pool in principal.models


def _fit(order: Order) -> Order:
    """The prompt must leave room for a token, if any is wanted; the token limit is cut to the room that is left."""
    card: ModelCard = order.model.card
    longest = max(len(p) for p in order.prompts)
    room = card.context_length - longest
    if room < min(1, order.sampling.max_tokens):
        raise ApiError(
            "context_length_exceeded",
            f"This model's maximum context length is {card.context_length} tokens. However, your {order.param} "
            f"resulted in {longest} tokens. Please reduce the length of the {order.param}.",
            param=order.param,
        )
    if order.sampling.max_tokens <= room:
        return order
    return replace(order, sampling=msgspec.structs.replace(order.sampling, max_tokens=room))


def _route(arrival: Arrival, principal: Principal, tier: TierFacts, order: Order) -> Route:
    return Route(
        request=arrival.request,
        pool=order.model.pool,
        model=order.model.card.model,
        tier=tier.name,
        tenant=principal.tenant,
        project=principal.project,
        key=principal.key_id,
        kind=order.kind,
        stream=order.stream,
        prompt_tokens=order.prompt_tokens,
        client_request_id=arrival.client_request_id,
    )


def _facts(principal: Principal, tier: TierFacts, order: Order, request: str, gateway: str, held: int) -> Facts:
    tokens = order.prompt_tokens + order.sampling.max_tokens * order.choices
    costs = {"requests": 1, "tokens": tokens}
    return Facts(
        request=request,
        tenant=principal.tenant,
        pool=order.model.pool,
        tier=tier.name,
        tier_rank=tier.rank,
        gateway=gateway,
        generation=principal.generation,
        hold_nano=held,
        floor_nano=principal.floor_nano,
        max_concurrent=principal.max_concurrent,
        max_queued_tier=tier.max_queued,
        max_queued_tenant=principal.max_queued,
        choices=order.choices,
        prompt_tokens=order.prompt_tokens,
        lease_ms=LEASE_MS,
        claim=order.claim,
        expires_ms=_expiry(order),
        limits=tuple((name, capacity, refill, costs.get(name, 1)) for name, capacity, refill in principal.limits),
        weight=principal.weight,
        ttft_ms=tier.ttft_ms,
        sheddable=tier.sheddable,
        ask=order.ask,
    )


def _expiry(order: Order) -> int:
    return int(time.time() * 1000) + order.deadline_ms if order.deadline_ms is not None else 0


def _work(arrival: Arrival, principal: Principal, tier: TierFacts, order: Order, gateway: str) -> Work:
    return Work(
        request=arrival.request,
        pool=order.model.pool,
        tier=tier.name,
        tier_rank=tier.rank,
        tenant=principal.tenant,
        reply_to=gateway,
        kind=order.kind,
        card_hash=order.model.card.hash,
        prompts=order.prompts,
        sampling=order.sampling,
        n=order.n,
        # All randomness of a request comes from its seed, so that it can be resumed on another engine.
        seed=order.seed & 0x7FFF_FFFF_FFFF_FFFF if order.seed is not None else secrets.randbits(63),
        arrival_ms=arrival.received_ms,
        ttft_target_ms=tier.ttft_ms,
        tpot_target_ms=tier.tpot_ms,
        expires_ms=_expiry(order),
        weight=principal.weight,
        salt=principal.salt,
        messages=order.messages,
        resumable=bool(order.ask),
        trace=arrival.trace,
        images=order.images,
    )


_MESSAGES = {
    "no_engine": "No engine is serving this model right now.",
    "concurrency_limit": "You have too many requests open at once.",
    "rate_limit_exceeded": "You are over your rate limit of {detail}.",
    "tenant_queue_full": "You have too many requests waiting.",
    "tier_queue_full": "Too many requests are waiting for this service tier.",
    "insufficient_quota": "Your balance does not cover this request.",
    "idempotency_in_flight": "A request with this Idempotency-Key is still being answered.",
    "idempotency_conflict": "This Idempotency-Key was used with another request body.",
}


def _refusal(verdict: Verdict) -> ApiError:
    code = "rate_limit_exceeded" if verdict.code == "rate_limit" else verdict.code
    message = _MESSAGES.get(code, "The request was refused.").format(detail=verdict.detail)
    return ApiError(code, message, retry_after_s=verdict.retry_after_s, headers=limit_headers(verdict))


def limit_headers(verdict: Verdict) -> dict[str, str]:
    """`x-ratelimit-*` of every rate limit that was looked at."""
    headers: dict[str, str] = {}
    if not verdict.ok and verdict.depth:
        headers["x-queue-depth"] = str(verdict.depth)
    for name, capacity, remaining, reset_s in verdict.limits:
        headers[f"x-ratelimit-limit-{name}"] = str(capacity)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, remaining))
        headers[f"x-ratelimit-reset-{name}"] = f"{reset_s}s"
    return headers
