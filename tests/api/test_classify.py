"""Images through HTTP, from a small ViT of random weights in an engine process of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest

from engine.protocol.messages import ModelCard, Sampling
from gateway.admission.admission import Admission, Arrival, Order
from gateway.admission.prices import Prices
from gateway.api.classify import Load
from gateway.api.classify import classify as answer_classify
from gateway.api.prompts import Prompts
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry import Model
from gateway.errors import ApiError
from tenants.principals import Principal
from tests.admission.test_keys import PRINCIPAL
from tests.api.test_chat import ask
from tests.api.test_embeddings import final
from tests.backends.test_image import png_of
from tests.harness import POOL, Gateway
from tests.pictures import LABELS, TOKENS, data_url, encoded, picture, vit_folder

MODEL = "pictures"
GOOD = data_url(encoded(picture()))


@pytest.fixture(scope="module")
def served(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    """The data plane with an engine of the ViT beside the simulated one."""
    folder = vit_folder(tmp_path_factory.mktemp("vit"))
    gateway.stack.engine(pool=MODEL, backend="image", model=str(folder), threads="1")
    return gateway


@pytest.fixture
def classify(served: Gateway) -> Iterator[Callable[..., httpx.Response]]:
    with served.client() as client:

        def post(given: Any, **fields: Any) -> httpx.Response:
            return client.post("/classify", json={"model": MODEL, "input": given, **fields}, timeout=120)

        yield post


def test_one_image(classify: Callable[..., httpx.Response]) -> None:
    response = classify(GOOD)
    answer = response.json()
    (found,) = answer["data"]
    assert response.status_code == 200 and answer["object"] == "list" and answer["model"] == MODEL
    assert answer["id"] == f"classify-{response.headers['x-request-id']}"
    assert sum(found["probs"]) == pytest.approx(1, abs=1e-5) and found["num_classes"] == len(LABELS)
    assert found["label"] == LABELS[found["probs"].index(max(found["probs"]))] == found["top"][0]["label"]
    assert [each["score"] for each in found["top"]] == sorted(found["probs"], reverse=True)
    assert answer["usage"] == {"prompt_tokens": TOKENS, "completion_tokens": 0, "total_tokens": TOKENS}


def test_several_images_are_answered_in_their_order(classify: Callable[..., httpx.Response]) -> None:
    urls = [
        data_url(encoded(picture(seed=1), "PNG")),
        data_url(encoded(picture(seed=2), "JPEG"), "image/jpeg"),
        data_url(encoded(picture(seed=3), "WEBP"), "image/webp"),
        data_url(encoded(picture(seed=4), "GIF"), "image/gif"),
    ]
    answer = classify(urls, top_k=2).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    for url, each in zip(urls, answer["data"], strict=True):
        (alone,) = classify(url, top_k=2).json()["data"]
        assert [t["label"] for t in each["top"]] == [t["label"] for t in alone["top"]] and len(each["top"]) == 2
        assert each["score"] == pytest.approx(alone["score"], abs=1e-6) and "probs" not in each
    assert answer["usage"]["prompt_tokens"] == 4 * TOKENS


def test_a_body_of_more_than_other_routes_take(classify: Callable[..., httpx.Response]) -> None:
    noise = encoded(picture(1200, 1100), "PNG", compress_level=0)
    assert 3 << 20 < len(noise) < 4 << 20
    assert len(classify([data_url(noise)] * 2).json()["data"]) == 2
    response = classify([data_url(noise)] * 3)
    assert response.status_code == 413 or "8 MiB in all" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "fields", "param", "code", "words"),
    [
        ("https://example.com/cat.png", {}, "input", "invalid_value", "not a data URL"),
        ("file:///etc/passwd", {}, "input", "invalid_value", "not a data URL"),
        ("", {}, "input", "invalid_value", "not a data URL"),
        ([], {}, "input", "invalid_value", "1 to 64 images"),
        ([GOOD] * 65, {}, "input", "invalid_value", "1 to 64 images"),
        (7, {}, "input", "invalid_type", "input"),
        ([GOOD, "x"], {}, "input", "invalid_value", "'input[1]'"),
        ("data:text/plain;base64,aGk=", {}, "input", "invalid_value", "media type 'text/plain'"),
        ("data:image/svg+xml;base64,PHN2Zy8+", {}, "input", "invalid_value", "image/svg+xml"),
        ("data:,hi", {}, "input", "invalid_value", "media type"),
        ("data:image/png,%89PNG", {}, "input", "invalid_value", "not in base64"),
        ("data:image/png;base64,iVBO*", {}, "input", "invalid_value", "not valid base64"),
        (GOOD.replace("image/png", "image/jpeg"), {}, "input", "invalid_value", "holds image/png"),
        (data_url(b"\x89PNG\r\n\x1a\n"), {}, "input", "invalid_value", "can't be used"),
        (data_url(png_of(50_000, 50_000)), {}, "input", "invalid_value", "25 million pixels"),
        (data_url(encoded(picture(300, 300))[:9000]), {}, "input", "invalid_image", "can't be decoded"),
        (GOOD, {"top_k": 0}, "top_k", "invalid_value", "top_k"),
        (GOOD, {"top_k": 6}, "top_k", "invalid_value", "5 classes"),
        (GOOD, {"model": POOL}, "model", "unsupported_value", "does not serve image requests"),
    ],
)
def test_what_is_wrong_is_named(
    classify: Callable[..., httpx.Response], given: Any, fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    response = classify(given, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error", response.text
    assert error["param"] == param and error["code"] == code and words in error["message"]


def test_an_image_model_answers_nothing_else(served: Gateway) -> None:
    with served.client() as client:
        responses = [
            ask(client, model=MODEL),
            client.post("/completions", json={"model": MODEL, "prompt": "a"}),
            client.post("/embeddings", json={"model": MODEL, "input": "a"}),
            client.post("/tokenize", json={"model": MODEL, "prompt": "a"}),
            client.post("/detokenize", json={"model": MODEL, "tokens": [1]}),
        ]
    for response in responses:
        error = response.json()["error"]
        assert response.status_code == 400 and (error["code"], error["param"]) == ("unsupported_value", "model")
        assert "image" in error["message"]


async def test_sixteen_at_once_get_their_own_answers(served: Gateway) -> None:
    async with served.async_client() as client:

        async def one(seed: int) -> Any:
            body = {"model": MODEL, "input": data_url(encoded(picture(seed=seed)))}
            return (await client.post("/classify", json=body, timeout=120)).json()["data"][0]["probs"]

        together = await asyncio.gather(*(one(seed) for seed in range(16)))
        assert await one(11) == pytest.approx(together[11], abs=1e-6)
    assert len({tuple(round(p, 4) for p in probs) for probs in together}) > 8


def test_one_usage_record_and_nothing_left_in_the_queue(
    served: Gateway, classify: Callable[..., httpx.Response]
) -> None:
    response = classify([GOOD] * 3)
    found = final(served, response.headers["x-request-id"])
    assert (found.reason, found.prompt_tokens, found.completion_tokens) == ("stop", 3 * TOKENS, 0)
    assert found.prompt_tokens == response.json()["usage"]["prompt_tokens"] and found.engine_s > 0
    assert "cost" in response.headers["server-timing"]
    assert not list(served.stack.redis.scan_iter(match=f"{served.stack.prefix}q:{MODEL}:*", count=1000))


def test_an_image_that_can_not_be_decoded_costs_nothing(
    served: Gateway, classify: Callable[..., httpx.Response]
) -> None:
    response = classify(data_url(encoded(picture(300, 300))[:9000]))
    found = final(served, response.headers["x-request-id"])
    assert (found.reason, found.code, found.prompt_tokens) == ("error", "invalid_image", 0)


def test_an_idempotency_key_gives_the_stored_answer(served: Gateway) -> None:
    body, headers = {"model": MODEL, "input": GOOD}, {"idempotency-key": "c-1"}
    with served.client() as client:
        first, second = (client.post("/classify", json=body, headers=headers) for _ in range(2))
    assert second.headers["idempotency-replayed"] == "true" and second.content == first.content


def test_limits_and_money_hold_for_images_too(served: Gateway) -> None:
    for tenant, given, code in (
        ("few-tokens", [GOOD] * 60, "rate_limit_exceeded"),
        ("prepaid", GOOD, "insufficient_quota"),
    ):
        with served.client(tenant) as client:
            response = client.post("/classify", json={"model": MODEL, "input": given})
        assert response.status_code == 429 and response.json()["error"]["code"] == code, response.text


def test_it_is_listed_and_described(served: Gateway, classify: Callable[..., httpx.Response]) -> None:
    with served.client() as client:
        model = client.get(f"/models/{MODEL}").json()
        document = client.get("/openapi.json").json()
    assert model["capabilities"] == ["image"] and model["context_length"] == TOKENS
    operation = document["paths"]["/v1/classify"]["post"]
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    wanted = operation["requestBody"]["content"]["application/json"]["schema"]
    parts = {"components": document["components"]}
    for body in ({}, {"top_k": 1}):
        jsonschema.Draft202012Validator({**answer, **parts}).validate(classify([GOOD], **body).json())
    request = jsonschema.Draft202012Validator({**wanted, **parts})
    request.validate({"model": MODEL, "input": [GOOD]})
    assert not request.is_valid({"model": MODEL, "input": "https://example.com/cat.png"})


def test_open_images_are_bounded_for_all_and_for_each() -> None:
    load = Load(100, 60)
    with load.carry("a", 60), load.carry("b", 40):
        with pytest.raises(ApiError) as mine, load.carry("a", 1):
            pass
        assert mine.value.code == "tenant_queue_full"
        with pytest.raises(ApiError) as everyone, load.carry("c", 1):
            pass
        assert everyone.value.code == "tier_queue_full"
    with load.carry("a", 60):
        pass


async def test_images_count_while_a_thread_reads_them_for_a_client_that_left() -> None:
    load, prompts, go_on = Load(100, 60), Prompts(), threading.Event()
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(reached.set)
        go_on.wait()

    async def request() -> None:
        with load.carry("a", 60) as carried:
            await carried.through(prompts.off_loop(work))

    asking = asyncio.create_task(request())
    await reached.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and not fits(load, 1), "the client is gone, its images are not"
    go_on.set()
    await become(lambda: fits(load, 60))
    prompts.close()


async def test_images_count_while_redis_decides_for_a_client_that_left() -> None:
    asked = asyncio.Event()
    open_ones: list[asyncio.StreamWriter] = []

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.append(writer)
        asked.set()

    async def price(*_: object) -> None:
        return None

    redis = await asyncio.start_server(silent, "127.0.0.1", 0)
    dispatcher = Dispatcher(f"redis://127.0.0.1:{redis.sockets[0].getsockname()[1]}/0", "none:", "g")
    admission = Admission(dispatcher, None, Prices(price), None)  # type: ignore[arg-type]
    load, card = Load(100, 60), ModelCard("m", "h", 1, 100, 100, (0,), None, False, "", "", ("image",), "m", 0)
    order = Order("image", Model("p", card, 1), ((0,),), Sampling(0), "input", images=(b"image",))

    async def request() -> None:
        with load.carry("a", 60) as carried:
            arrival = Arrival("r", time.monotonic(), 0, None, None)
            await admission.admit(arrival, PRINCIPAL, replace(order, watch=carried.until))

    asking = asyncio.create_task(request())
    await asked.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and not fits(load, 1), "what was asked of Redis still holds them"
    redis.close()
    for each in open_ones:
        each.close()
    await become(lambda: fits(load, 60))
    await dispatcher.redis.aclose()


def fits(load: Load, count: int) -> bool:
    try:
        with load.carry("a", count):
            return True
    except ApiError:
        return False


async def become(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.01)


async def test_a_body_counts_before_it_is_read_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    async def identify(*_: object) -> Principal:
        return PRINCIPAL

    plane = SimpleNamespace(admission=SimpleNamespace(identify=identify))
    monkeypatch.setattr("gateway.api.classify.current", lambda: plane)
    monkeypatch.setattr("gateway.api.classify._load", Load(100, 10))
    with pytest.raises(ApiError) as refused:
        await answer_classify(SimpleNamespace(arrival=None, raw=b"neither short nor JSON"))  # type: ignore[arg-type]
    assert refused.value.code == "tenant_queue_full"
