"""`POST /v1/tokenize` and `POST /v1/detokenize`: computed in the gateway, nothing is queued or billed."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http import HttpResponseBase

from engine.protocol.messages import ModelCard
from gateway.api.handler import DataRequest
from gateway.api.parse import parse_body
from gateway.api.responses import json_response
from gateway.api.schemas.messages import render
from gateway.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.errors import ApiError
from gateway.plane import current

__all__ = ["detokenize", "tokenize"]


async def tokenize(request: DataRequest) -> HttpResponseBase:
    plane = current()
    principal = await plane.admission.identify(request.arrival, "inference")
    body = await parse_body(plane, request, TokenizeRequest)
    card = _with_text((await plane.admission.find_model(request.arrival, principal, body.model)).card)
    if body.messages is not None:
        tools = msgspec.to_builtins(body.tools) if body.tools else None
        conversation = await plane.prompts.chat(card, render(body.messages), tools, body.options())
        ids = list(conversation[0])
    else:
        ids = await plane.prompts.text(card, body.prompt or "")
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": card.context_length, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await plane.prompts.pieces(card, ids)
    return json_response(answer)


async def detokenize(request: DataRequest) -> HttpResponseBase:
    plane = current()
    principal = await plane.admission.identify(request.arrival, "inference")
    body = await parse_body(plane, request, DetokenizeRequest)
    card = _with_text((await plane.admission.find_model(request.arrival, principal, body.model)).card)
    return json_response({"prompt": await plane.prompts.decode(card, body.tokens)})


def _with_text(card: ModelCard) -> ModelCard:
    if not card.vocab_size:
        raise ApiError("unsupported_value", f"The model '{card.model}' takes images and has no tokens.", param="model")
    return card
