"""Embeddings through HTTP, from the real MiniLM in an engine process of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI

from engine.protocol.keys import Keys
from engine.protocol.messages import Final, Outcome, decode
from tests.api.test_chat import ask
from tests.harness import POOL, Gateway

MODEL = "minilm"
DIMENSIONS = 384


@pytest.fixture(scope="module")
def served(gateway: Gateway, embedding_model: Path) -> Gateway:
    """The data plane with an engine of MiniLM beside the simulated one."""
    gateway.stack.engine(pool=MODEL, backend="embedding", model=str(embedding_model), threads="1")
    return gateway


@pytest.fixture
def embed(served: Gateway) -> Iterator[Callable[..., httpx.Response]]:
    with served.client() as client:

        def post(given: Any, **fields: Any) -> httpx.Response:
            return client.post("/embeddings", json={"model": MODEL, "input": given, **fields}, timeout=120)

        yield post


@pytest.fixture
def ai(served: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.base, api_key=served.stack.keys["alpha"], max_retries=0) as client:
        yield client


def final(gateway: Gateway, request: str) -> Final:
    """The usage record of a request."""

    def find() -> Final | None:
        entries = gateway.stack.redis.xrange(f"{gateway.stack.prefix}usage")
        finals = (decode(fields[b"f"], Final) for _, fields in entries)
        return next((each for each in finals if each.request == request), None)

    return until(find)


def until(look: Callable[[], Any]) -> Any:
    """What `look` finds, as soon as it finds something."""
    ends = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < ends, "not within 30 s"
        time.sleep(0.02)
    return found


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_the_official_client_which_asks_for_base64(ai: OpenAI) -> None:
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose by half a point."]
    answer = ai.embeddings.create(model=MODEL, input=texts)
    cat, kitten, rates = (each.embedding for each in answer.data)
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == MODEL
    assert len(cat) == DIMENSIONS and math.isclose(cosine(cat, cat), 1, rel_tol=1e-5)
    assert cosine(cat, kitten) > 0.5 > cosine(cat, rates) + 0.3
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 + 9 + 10
    numbers = ai.embeddings.create(model=MODEL, input=texts, encoding_format="float").data
    assert [each.embedding for each in numbers] == [pytest.approx(each.embedding, abs=1e-7) for each in answer.data]


def test_every_form_of_input_gives_the_same_vectors(served: Gateway, embed: Callable[..., httpx.Response]) -> None:
    texts = ["one", "two words"]
    with served.client() as client:
        counted = [client.post("/tokenize", json={"model": MODEL, "prompt": t}).json()["tokens"] for t in texts]
    assert counted[0][0] == 101 and counted[0][-1] == 102, "as a text is computed: with its start and its end"
    many = [each["embedding"] for each in embed(texts).json()["data"]]
    assert [each["embedding"] for each in embed(counted).json()["data"]] == many
    for given in (texts[0], counted[0], [texts[0]]):
        assert [each["embedding"] for each in embed(given).json()["data"]] == many[:1]


def test_base64_is_the_same_float32(embed: Callable[..., httpx.Response]) -> None:
    (packed,) = embed("same", encoding_format="base64").json()["data"]
    (plain,) = embed("same", encoding_format="float").json()["data"]
    assert array("f", base64.b64decode(packed["embedding"])).tolist() == array("f", plain["embedding"]).tolist()


def test_a_special_token_in_a_text_is_text(embed: Callable[..., httpx.Response]) -> None:
    assert embed("a [SEP] b").json()["usage"]["prompt_tokens"] == 2 + 5


@pytest.mark.parametrize(
    ("given", "fields", "param", "code"),
    [
        ("", {}, "input", "invalid_value"),
        ([], {}, "input", "invalid_value"),
        (["a", ""], {}, "input", "invalid_value"),
        ([[]], {}, "input", "invalid_value"),
        (["a", [101]], {}, "input", "invalid_value"),
        (None, {}, "input", "invalid_type"),
        ([1.5], {}, "input", "invalid_type"),
        ([30522], {}, "input", "invalid_value"),
        ([[101, -1]], {}, "input", "invalid_value"),
        (["a"] * 2049, {}, "input", "invalid_value"),
        ([[101] * 256] * 1200, {}, "input", "invalid_value"),
        ("a " * 300, {}, "input", "context_length_exceeded"),
        (["fits", "a" * 100_000], {}, "input", "context_length_exceeded"),
        ([101] * 257, {}, "input", "context_length_exceeded"),
        ("a", {"dimensions": 128}, "dimensions", "unsupported_value"),
        ("a", {"dimensions": 0}, "dimensions", "invalid_value"),
        ("a", {"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ("a", {"model": POOL}, "model", "unsupported_value"),
    ],
)
def test_what_is_wrong_is_named(
    embed: Callable[..., httpx.Response], given: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    response = embed(given, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error", response.text
    assert error["param"] == param and error["code"] == code


def test_what_fits_exactly_is_computed(embed: Callable[..., httpx.Response]) -> None:
    assert embed([101, *[1037] * 254, 102]).json()["usage"]["prompt_tokens"] == 256
    assert len(embed("a", dimensions=DIMENSIONS, user="u-1").json()["data"][0]["embedding"]) == DIMENSIONS


def test_an_embedding_model_answers_no_chat(served: Gateway) -> None:
    with served.client() as client:
        responses = [ask(client, model=MODEL), client.post("/completions", json={"model": MODEL, "prompt": "a"})]
    for response in responses:
        error = response.json()["error"]
        assert response.status_code == 400 and (error["code"], error["param"]) == ("unsupported_value", "model")
        assert "embedding requests" in error["message"]


def test_it_is_listed_and_described(served: Gateway, embed: Callable[..., httpx.Response]) -> None:
    with served.client() as client:
        model = client.get(f"/models/{MODEL}").json()
        document = client.get("/openapi.json").json()
    assert model["capabilities"] == ["embedding"] and model["context_length"] == 256
    content = document["paths"]["/v1/embeddings"]["post"]["responses"]["200"]["content"]["application/json"]
    validator = jsonschema.Draft202012Validator({**content["schema"], "components": document["components"]})
    for form in ("float", "base64"):
        validator.validate(embed(["a", "b"], encoding_format=form).json())


def test_one_usage_record_with_the_tokens_of_all_inputs(served: Gateway, embed: Callable[..., httpx.Response]) -> None:
    response = embed(["one", "two words"])
    found = final(served, response.headers["x-request-id"])
    assert (found.reason, found.prompt_tokens, found.completion_tokens, found.cached_tokens) == ("stop", 7, 0, 0)
    assert found.engine_s > 0 and found.timeline.prefill_s is not None and "cost" in response.headers["server-timing"]
    cost = response.headers["server-timing"].partition('cost;desc="')[2].partition(" ")[0]
    assert float(cost) == pytest.approx(7 * 0.05e-6), "the default price's input, and no output"


def test_an_idempotency_key_gives_the_stored_vectors(served: Gateway) -> None:
    body = {"model": MODEL, "input": "again"}
    with served.client() as client:
        first, second = (client.post("/embeddings", json=body, headers={"idempotency-key": "e-1"}) for _ in range(2))
    assert second.headers["idempotency-replayed"] == "true" and second.content == first.content


def test_limits_and_money_hold_for_embeddings_too(served: Gateway) -> None:
    def refusal(tenant: str, given: Any) -> dict[str, Any]:
        with served.client(tenant) as client:
            response = client.post("/embeddings", json={"model": MODEL, "input": given})
        assert response.status_code == 429, response.text
        return response.json()["error"]

    assert refusal("few-tokens", [[101] * 200] * 3)["code"] == "rate_limit_exceeded"
    assert refusal("prepaid", "no balance")["code"] == "insufficient_quota"


def test_many_inputs_at_once_and_one_beside_them(ai: OpenAI) -> None:
    texts = [[101, 1000 + n, 102] for n in range(2048)]
    vectors = [each.embedding for each in ai.embeddings.create(model=MODEL, input=texts, timeout=120).data]
    assert len(vectors) == 2048
    alone = ai.embeddings.create(model=MODEL, input=texts[1234]).data[0].embedding
    assert alone == vectors[1234], "who shares its batch does not change a vector"


def test_a_client_that_leaves_stops_its_request(served: Gateway, embed: Callable[..., httpx.Response]) -> None:
    given = [[101] + [1037] * 98 + [102]] * 2048
    with served.client() as client, pytest.raises(httpx.ReadTimeout):
        headers = {"x-client-request-id": "leaves"}
        client.post("/embeddings", json={"model": MODEL, "input": given}, headers=headers, timeout=3)
    assert embed("the engine is free again").status_code == 200
    found = final(served, _request_of(served, "leaves"))
    assert found.reason == "abort" and 0 < found.prompt_tokens < 204_800
    assert found.prompt_tokens % 100 == 0, "whole texts were computed, or not at all"


@pytest.mark.parametrize(
    ("tier", "many", "one"), [("batch", "gamma", "alpha"), ("standard", "beta", "delta")], ids=["tiers", "tenants"]
)
async def test_many_inputs_hold_up_nobody_else(served: Gateway, tier: str, many: str, one: str) -> None:
    """Neither a better tier nor another tenant of the same one."""
    crowd = {"model": MODEL, "input": [[101, *[1037] * 38, 102]] * 2048}
    async with served.async_client(many) as crowding, served.async_client(one) as client:
        asking = asyncio.create_task(crowding.post("/embeddings", json=crowd, timeout=300))
        rows = Keys(served.stack.prefix).rows(MODEL)
        await asyncio.to_thread(until, lambda: served.stack.redis.hget(rows, tier))
        response = await client.post("/embeddings", json={"model": MODEL, "input": "just one"}, timeout=120)
        assert response.status_code == 200 and not asking.done()
        asking.cancel()


def _request_of(gateway: Gateway, client_request_id: str) -> str:

    def find() -> Outcome | None:
        entries = gateway.stack.redis.xrange(f"{gateway.stack.prefix}outcomes")
        outcomes = (decode(next(iter(fields.values())), Outcome) for _, fields in entries)
        return next((each for each in outcomes if each.client_request_id == client_request_id), None)

    outcome = until(find)
    assert (outcome.status, outcome.kind) == (499, "embedding")
    return outcome.request


def test_what_does_not_start_in_time_expires(served: Gateway, embed: Callable[..., httpx.Response]) -> None:
    response = embed("too late", deadline_ms=1)
    assert response.status_code == 503 and response.json()["error"]["code"] == "queue_timeout"


async def test_over_the_websocket(served: Gateway) -> None:
    from websockets.asyncio.client import connect

    headers = {"Authorization": f"Bearer {served.stack.keys['alpha']}"}
    async with connect(f"ws://127.0.0.1:{served.port}/v1/stream", additional_headers=headers) as socket:
        body = {"model": MODEL, "input": ["a", "b"]}
        await socket.send(json.dumps({"type": "request", "id": "e", "path": "/v1/embeddings", "body": body}))
        said = [json.loads(await socket.recv()) for _ in range(4)]
    assert [each["type"] for each in said] == ["ready", "accepted", "response", "done"]
    assert [each["index"] for each in said[2]["data"]["data"]] == [0, 1]


def test_errors_of_the_official_client(ai: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ai.embeddings.create(model=MODEL, input="a", dimensions=100)
    assert refused.value.param == "dimensions"
