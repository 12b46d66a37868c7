"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.conf import settings
from django.http import HttpResponseBase

from engine.protocol.messages import ModelCard, Sampling
from gateway.admission.admission import Arrival, Order, Replay, limit_headers
from gateway.api.answer import EVENT_STREAM, Answer, Wish
from gateway.api.handler import DataRequest
from gateway.api.idempotency import claim_of, replay
from gateway.api.parse import parse_body
from gateway.api.responses import EventStream, raw_json
from gateway.api.schemas.chat import ChatRequest
from gateway.api.schemas.common import GenerationRequest, check_bias, stops_of, unsupported
from gateway.api.schemas.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from gateway.api.schemas.messages import render
from gateway.api.schemas.structured import TextFormat, Wanted
from gateway.dispatch.registry import Model
from gateway.errors import ApiError
from gateway.plane import Plane, current
from tenants.principals import Principal

__all__ = ["chat_completions", "chat_order", "check_capability", "completion_order", "completions"]

_STREAM_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


async def chat_completions(request: DataRequest) -> HttpResponseBase:
    plane = current()
    principal = await plane.admission.identify(request.arrival, "inference")
    body = await parse_body(plane, request, ChatRequest)
    order, wish = await chat_order(plane, request.arrival, principal, body)
    return await _answer(plane, request, principal, order, wish)


async def completions(request: DataRequest) -> HttpResponseBase:
    plane = current()
    principal = await plane.admission.identify(request.arrival, "inference")
    body = await parse_body(plane, request, CompletionRequest)
    order, wish = await completion_order(plane, request.arrival, principal, body)
    return await _answer(plane, request, principal, order, wish)


async def chat_order(plane: Plane, arrival: Arrival, principal: Principal, body: ChatRequest) -> tuple[Order, Wish]:
    """A checked chat request as what admission takes."""
    model = await plane.admission.find_model(arrival, principal, body.model)
    check_capability(model, "chat")
    messages = render(body.messages)
    calls = body.calling()
    if calls is not None and "tools" not in model.card.capabilities:
        raise unsupported("tools", "this model can't call tools.")
    if calls is not None and calls.forced and "grammar" not in model.card.capabilities:
        raise unsupported("tool_choice", "this model's engine can't be made to call a tool; use 'auto'.")
    grammar = await _grammar(plane, principal, model, body.constraint(calls))
    sampling = _sampling(body, model.card, body.token_limit, top_logprobs=_chat_logprobs(body), grammar=grammar)
    shown = calls.shown if calls is not None else None
    prompts = await plane.prompts.chat(model.card, messages, shown, body.options())
    order = _order(body, "chat", model, prompts, sampling, "messages", messages)
    # With a format the answer itself may be such an object: then calls are known by their marks alone.
    bare = body.response_format is None or isinstance(body.response_format, TextFormat)
    wish = Wish(True, body.include_usage, logprobs=bool(body.logprobs), tier=body.service_tier, calls=calls, bare=bare)
    return order, wish


async def completion_order(
    plane: Plane, arrival: Arrival, principal: Principal, body: CompletionRequest
) -> tuple[Order, Wish]:
    """A checked text completion request as what admission takes."""
    model = await plane.admission.find_model(arrival, principal, body.model)
    check_capability(model, "completion")
    if body.max_tokens == 0:
        raise unsupported("max_tokens", "an echo without an answer can't be computed; ask for at least 1 token.")
    limit = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
    wanted = body.logprobs if body.logprobs is not None else -1
    if wanted >= 0 and body.echo:
        raise unsupported("logprobs", "log-probabilities of the prompt can't be computed; drop 'echo' or 'logprobs'.")
    if body.chooses and "logprobs" not in model.card.capabilities:
        raise unsupported("best_of", "this model does not report the log-probabilities that tell which is the best.")
    grammar = await _grammar(plane, principal, model, body.constraint())
    told = max(wanted, 0) if body.chooses else wanted
    sampling = _sampling(body, model.card, limit, top_logprobs=told, grammar=grammar)
    given = body.prompts()
    prompts = await plane.prompts.completion(model.card, given)
    echoes = await _echoes(plane, body, model.card, given) if body.echo else ()
    order = replace(_order(body, "completion", model, prompts, sampling, "prompt", []), n=body.made)
    shown = body.n or 1 if body.chooses else 0
    wish = Wish(False, body.include_usage, logprobs=wanted >= 0, tier=body.service_tier, echoes=echoes, best=shown)
    return order, wish


async def _answer(
    plane: Plane, request: DataRequest, principal: Principal, order: Order, wish: Wish
) -> HttpResponseBase:
    """Admit, then answer whole or as events. Whatever ends it early, `Answer.close` is reached."""
    order = replace(order, claim=claim_of(request))
    try:
        ticket = await plane.admission.admit(request.arrival, principal, order)
    except Replay as earlier:
        return await replay(plane.dispatcher.redis, plane.dispatcher.keys, earlier.request)
    answer = Answer(ticket, wish, plane.dispatcher)
    headers = limit_headers(ticket.verdict)
    try:
        if not order.stream:
            body = await answer.whole()
            return raw_json(body, headers={**headers, "server-timing": answer.timing(ended=True)})
        response = EventStream(EVENT_STREAM, {**headers, **_STREAM_HEADERS})
        response.prepare(request.arrival.request, request.lane)
        first = await answer.first(settings.SLUICE_FIRST_BYTE_WAIT_S, response)
    except BaseException as error:
        answer.close(error)
        raise
    response["server-timing"] = answer.timing(ended=False)
    response.events = answer.events(first, request.lane)
    # Also when the client leaves before the first event is asked for and the generator never runs.
    response._resource_closers.append(answer.close)  # type: ignore[attr-defined]
    return response


def _sampling(
    body: GenerationRequest, card: ModelCard, limit: int | None, *, top_logprobs: int, grammar: str
) -> Sampling:
    temperature = body.temperature if body.temperature is not None else 1.0
    top_p = body.top_p if body.top_p is not None else 1.0
    for token in body.stop_token_ids or ():
        if token >= card.vocab_size:
            raise ApiError("invalid_value", f"{token} is not a token id of this model.", param="stop_token_ids")
    if top_logprobs >= 0 and "logprobs" not in card.capabilities:
        raise unsupported("logprobs", "this model does not report log-probabilities.")
    return Sampling(
        max_tokens=limit if limit is not None else card.context_length,
        # A nucleus of nothing is the most likely token.
        temperature=temperature if top_p > 0 else 0.0,
        top_p=top_p if top_p > 0 else 1.0,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=check_bias(body.logit_bias, card.vocab_size),
        stop=stops_of(body.stop),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        logprobs=top_logprobs,
        grammar=grammar,
    )


def _order(
    body: GenerationRequest,
    kind: str,
    model: Model,
    prompts: tuple[tuple[int, ...], ...],
    sampling: Sampling,
    param: str,
    messages: list[dict[str, Any]],
) -> Order:
    return Order(
        kind=kind,
        model=model,
        prompts=prompts,
        sampling=sampling,
        param=param,
        n=body.n or 1,
        seed=body.seed,
        service_tier=body.service_tier,
        stream=bool(body.stream),
        deadline_ms=body.deadline_ms,
        messages=messages,
    )


def _chat_logprobs(body: ChatRequest) -> int:
    return (body.top_logprobs or 0) if body.logprobs else -1


def check_capability(model: Model, capability: str) -> None:
    """400 on a route that the model does not serve."""
    capabilities = model.card.capabilities
    if capability not in capabilities:
        routes = [name for name in ("chat", "completion", "embedding", "image") if name in capabilities]
        does = f"{' and '.join(routes)} requests" if routes else "none of these routes"
        message = f"The model '{model.card.model}' does not serve {capability} requests; it serves {does}."
        raise ApiError("unsupported_value", message, param="model")


async def _grammar(plane: Plane, principal: Principal, model: Model, wanted: Wanted | None) -> str:
    """The constraint as the engine takes it, tried before anything is admitted; empty for none."""
    if wanted is None:
        return ""
    if "grammar" not in model.card.capabilities:
        raise unsupported(wanted.param.partition(".")[0], "this model's engine can't constrain its answers.")
    grammar = wanted.text()
    await plane.grammars.check(model.card, grammar, wanted.param, principal.tenant)
    return grammar


async def _echoes(plane: Plane, body: CompletionRequest, card: ModelCard, given: list[Any]) -> list[str]:
    """The text of each prompt, once per choice."""
    texts = [p if isinstance(p, str) else await plane.prompts.decode(card, p) for p in given]
    return [text for text in texts for _ in range(body.n or 1)]
