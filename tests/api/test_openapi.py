"""The description is valid, complete, and true of real answers."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.test_chat import ASK, ask
from tests.harness import POOL


@pytest.fixture
def document(client: httpx.Client) -> dict[str, Any]:
    return httpx.get(f"{client.base_url}openapi.json").raise_for_status().json()


def validate(document: dict[str, Any], path: str, response: httpx.Response) -> None:
    (operation,) = document["paths"][path].values()
    answer = operation["responses"][str(response.status_code)]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**answer, "components": document["components"]}).validate(response.json())


def test_every_route_is_described_and_every_description_has_a_route(document: dict[str, Any]) -> None:
    from gateway.urls_data import urlpatterns

    routes = {"/" + str(p.pattern).replace("<path:model>", "{model}") for p in urlpatterns[:-1]}
    assert routes == set(document["paths"])


def test_schemas_are_valid(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_requests_that_pass_are_described(client: httpx.Client, document: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(ASK)
    for wrong in ({"temperature": 3}, {"messages": []}, {"messages": [{"role": "wizard"}]}, {"n": 0}):
        assert not validator.is_valid({**ASK, **wrong}) and ask(client, **wrong).status_code == 400


def test_real_answers_are_as_described(client: httpx.Client, document: dict[str, Any]) -> None:
    chat, text = "/v1/chat/completions", "/v1/completions"
    validate(document, chat, ask(client, logprobs=True, top_logprobs=1, n=2, service_tier="auto"))
    validate(document, chat, ask(client, max_tokens=0))
    validate(document, chat, ask(client, model="none"))
    body = {"model": POOL, "prompt": "a", "logprobs": 1, "max_tokens": 2}
    validate(document, text, client.post("/completions", json=body))
    validate(document, "/v1/models", client.get("/models"))
    validate(document, "/v1/models/{model}", client.get(f"/models/{POOL}"))
    validate(document, "/v1/models/{model}", client.get("/models/none"))
    validate(document, "/v1/tokenize", client.post("/tokenize", json={"model": POOL, "prompt": "a"}))
    validate(document, "/v1/detokenize", client.post("/detokenize", json={"model": POOL, "tokens": [97]}))
    validate(document, "/healthz", client.get(f"{str(client.base_url).removesuffix('/v1/')}/healthz"))
