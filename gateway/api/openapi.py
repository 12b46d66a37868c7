"""The OpenAPI 3.1 description of the data plane: request schemas from the code that checks them, answers from here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import orjson
from django.http import HttpResponseBase

from engine.protocol.images import MAX_IMAGES
from gateway.api.handler import DataRequest
from gateway.api.responses import raw_json
from gateway.api.schemas.chat import ChatRequest
from gateway.api.schemas.classify import ClassifyRequest
from gateway.api.schemas.completion import CompletionRequest
from gateway.api.schemas.embedding import EmbeddingRequest
from gateway.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.errors import CODES

__all__ = ["describe", "document"]

_REF = "#/components/schemas/{name}"
_REQUESTS = (
    *(ChatRequest, CompletionRequest, EmbeddingRequest, ClassifyRequest),
    *(TokenizeRequest, DetokenizeRequest),
)
_GENERATION_ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503)
_READ_ERRORS = (400, 401, 403, 404, 405, 413, 500, 503)

Schema = dict[str, Any]


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


_STR, _INT, _NUMBER, _BOOL = ({"type": t} for t in ("string", "integer", "number", "boolean"))
_COUNT = {"type": "integer", "minimum": 0}
_FINISH = {"type": "string", "enum": ["stop", "length", "tool_calls", "content_filter"]}
_HEAD = {"id": _STR, "created": _INT, "model": _STR, "system_fingerprint": _STR}
_TOKEN = {"token": _STR, "logprob": _NUMBER, "bytes": _list(_INT)}
_USAGE_DETAILS = {"cached_tokens": _COUNT, "audio_tokens": _COUNT}

_ANSWERS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _STR,
                    "type": _STR,
                    "param": _nullable(_STR),
                    "code": {"type": "string", "enum": sorted(CODES)},
                }
            )
        }
    ),
    "Usage": _object(
        {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
        {"prompt_tokens_details": _object(_USAGE_DETAILS), "completion_tokens_details": {"type": "object"}},
    ),
    "ChatLogprobs": _object(
        {"content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})), "refusal": {"type": "null"}}
    ),
    "CompletionLogprobs": _object(
        {
            "tokens": _list(_STR),
            "token_logprobs": _list(_NUMBER),
            "top_logprobs": _list({"type": "object", "additionalProperties": _NUMBER}),
            "text_offset": _list(_COUNT),
        }
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "usage": _ref("Usage"),
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _object(
                            {"role": {"const": "assistant"}, "content": _nullable(_STR), "refusal": _nullable(_STR)}
                        ),
                        "logprobs": _nullable(_ref("ChatLogprobs")),
                        "finish_reason": _FINISH,
                    }
                )
            ),
        },
        {"service_tier": _STR},
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "usage": _ref("Usage"),
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": _STR,
                        "logprobs": _nullable(_ref("CompletionLogprobs")),
                        "finish_reason": _FINISH,
                    }
                )
            ),
        },
        {"service_tier": _STR},
    ),
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "model": _STR,
            "data": _list(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": _COUNT,
                        "embedding": {"anyOf": [_list(_NUMBER), {"type": "string", "contentEncoding": "base64"}]},
                    }
                )
            ),
            "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "Classes": _object(
        {
            "id": _STR,
            "object": {"const": "list"},
            "created": _INT,
            "model": _STR,
            "data": _list(
                _object(
                    {
                        "index": _COUNT,
                        "label": _STR,
                        "score": _NUMBER,
                        "num_classes": _COUNT,
                        "top": _list(_object({"index": _COUNT, "label": _STR, "score": _NUMBER})),
                    },
                    {"probs": _list(_NUMBER)},
                )
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Model": _object(
        {"id": _STR, "object": {"const": "model"}, "created": _INT, "owned_by": _STR},
        {"context_length": _COUNT, "capabilities": _list(_STR), "aliases": _list(_STR), "available": _BOOL},
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Tokens": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}, {"token_strs": _list(_STR)}),
    "Text": _object({"prompt": _STR}),
    "Health": _object({"status": _STR}, {"reasons": _list(_STR), "gateway": _STR}),
}


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The whole description."""
    _, requests = msgspec.json.schema_components(_REQUESTS, ref_template=_REF)
    _narrow(requests)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sluice",
            "version": "1",
            "description": "An OpenAI-compatible API with service tiers, limits and billing. Unknown request fields "
            "are ignored; a token limit larger than the context is a cap.",
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key: sk-..."}},
            "schemas": {**requests, **_ANSWERS},
        },
    }


def _narrow(requests: dict[str, Schema]) -> None:
    """Say in the schemas what the rules between fields refuse whatever the model is."""
    chat = requests["ChatRequest"]["properties"]
    for name in ("audio", "web_search_options", "functions", "function_call"):
        chat[name] = {"type": "null"}
    chat["store"] = {"enum": [None, False]}
    chat["verbosity"] = {"enum": [None, "medium"]}
    chat["reasoning_effort"] = {"enum": [None, "none"]}
    chat["modalities"] = {"enum": [None, ["text"]]}
    url = {"type": "string", "pattern": "^data:image/(png|jpeg|webp|gif);base64,"}
    images = {"type": "array", "items": url, "minItems": 1, "maxItems": MAX_IMAGES}
    requests["ClassifyRequest"]["properties"]["input"] = {"anyOf": [url, images]}
    text = requests["CompletionRequest"]["properties"]
    text["suffix"] = {"enum": [None, ""]}
    given = {"properties": {"prompt": _STR, "messages": {"type": "null"}}, "required": ["prompt"]}
    chatted = {"properties": {"prompt": {"type": "null"}, "messages": {"type": "array"}}, "required": ["messages"]}
    requests["TokenizeRequest"]["oneOf"] = [given, chatted]


def _paths() -> dict[str, Any]:
    generate = {"parameters": [_IDEMPOTENCY]}
    chat = _post("createChatCompletion", "Answer a conversation.", "ChatRequest", "ChatCompletion", True)
    model = {"name": "model", "in": "path", "required": True, "schema": _STR, "description": "May contain slashes."}
    return {
        "/v1/chat/completions": {"post": generate | chat},
        "/v1/completions": {
            "post": generate | _post("createCompletion", "Continue a text.", "CompletionRequest", "Completion", True)
        },
        "/v1/embeddings": {
            "post": generate | _post("createEmbedding", "A vector for each text.", "EmbeddingRequest", "Embeddings")
        },
        "/v1/classify": {
            "post": generate | _post("classify", "The classes of each image.", "ClassifyRequest", "Classes")
        },
        "/v1/tokenize": {
            "post": _post("tokenize", "Token ids of a text or conversation.", "TokenizeRequest", "Tokens")
        },
        "/v1/detokenize": {"post": _post("detokenize", "Text of token ids.", "DetokenizeRequest", "Text")},
        "/v1/models": {"get": _get("listModels", "Models that the key may use.", "ModelList")},
        "/v1/models/{model}": {
            "get": {"parameters": [model]} | _get("retrieveModel", "One model, by name or alias.", "Model")
        },
        "/v1/openapi.json": {"get": _open(_get("describe", "This description.", None))},
        "/healthz": {"get": _open(_get("health", "Whether the process answers.", "Health"))},
        "/metrics": {"get": _open(_plain("metrics", "Prometheus figures, for private networks only."))},
        "/readyz": {
            "get": _open(_get("ready", "Whether a request finds a queue and an engine.", "Health", {503: "Health"}))
        },
    }


_IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same body gives the stored answer for 24 hours, computed and billed once.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[\\x21-\\x7e]+$"},
}


def _post(name: str, summary: str, request: str, answer: str, streams: bool = False) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": _responses(answer, _GENERATION_ERRORS, streams),
    }


def _get(name: str, summary: str, answer: str | None, more: dict[int, str] | None = None) -> dict[str, Any]:
    responses = _responses(answer, _READ_ERRORS)
    for status, schema in (more or {}).items():
        responses[str(status)] = {"description": "Not now.", "content": {"application/json": {"schema": _ref(schema)}}}
    return {"operationId": name, "summary": summary, "responses": responses}


def _plain(name: str, summary: str) -> dict[str, Any]:
    operation = _get(name, summary, None)
    operation["responses"]["200"]["content"] = {"text/plain": {"schema": _STR}}
    return operation


def _open(operation: dict[str, Any]) -> dict[str, Any]:
    """Asked without a key."""
    return operation | {"security": []}


def _responses(answer: str | None, errors: tuple[int, ...], streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer) if answer else {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": _STR}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in errors:
        codes = ", ".join(sorted(code for code, facts in CODES.items() if facts.status == status))
        error = {"application/json": {"schema": _ref("Error")}}
        responses[str(status)] = {"description": f"Codes: {codes}.", "content": error}
    return responses


async def describe(request: DataRequest) -> HttpResponseBase:
    return raw_json(_encoded())


@lru_cache(maxsize=1)
def _encoded() -> bytes:
    return orjson.dumps(document())
