"""Web pages of allowed origins may call the API and read every answer; others may not, and nothing else is opened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.test_chat import ASK, ask
from tests.harness import Gateway, Stack, events

PAGE = "https://app.example"
OTHER = "https://other.example"
ASKED = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"


def preflight(gateway: Gateway, path: str = "/chat/completions", **headers: str) -> httpx.Response:
    """What a browser sends before it posts, without a key."""
    sent = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": ASKED}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.options(gateway.base + path, headers={k: v for k, v in sent.items() if v})


def cors_of(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


@pytest.fixture(scope="module")
def listed(stack: Stack, gateway: Gateway) -> Iterator[Gateway]:
    """A data plane that knows two origins; it shares the engine of `gateway`."""
    running = stack.gateway(SLUICE_CORS_ORIGINS=f"HTTPS://App.example/, {OTHER}:8443")
    yield running
    running.process.stop()


@pytest.fixture(scope="module")
def closed(stack: Stack, gateway: Gateway) -> Iterator[Gateway]:
    """A data plane with cross-origin access switched off."""
    running = stack.gateway(SLUICE_CORS_ORIGINS="")
    yield running
    running.process.stop()


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/chat/completions", {"POST"}),
        ("/models", {"GET", "HEAD"}),
        ("/models/org/name", {"GET", "HEAD"}),
        ("/nothing", {"GET", "POST", "PUT", "PATCH", "DELETE"}),
    ],
)
def test_a_preflight_needs_no_key_and_names_the_methods_of_the_route(
    gateway: Gateway, path: str, methods: set[str]
) -> None:
    response = preflight(gateway, path)
    assert response.status_code == 204 and response.content == b""
    cors = cors_of(response)
    assert cors["access-control-allow-origin"] == "*"
    assert cors["access-control-allow-headers"] == ASKED
    assert methods <= set(cors["access-control-allow-methods"].split(", "))
    assert ("POST" in cors["access-control-allow-methods"]) == ("POST" in methods)
    assert int(cors["access-control-max-age"]) > 0
    assert "access-control-request-headers" in response.headers["vary"]
    assert "access-control-allow-credentials" not in cors


@pytest.mark.parametrize("names", ["a" * 3000, "x y", "x:y", "x,,y", "*", "", "x;y", "<b>"])
def test_only_plain_and_few_header_names_are_reflected(gateway: Gateway, names: str) -> None:
    response = preflight(gateway, access_control_request_headers=names)
    assert response.status_code == 204
    assert "access-control-allow-headers" not in response.headers


@pytest.mark.parametrize("change", [{"origin": ""}, {"access_control_request_method": ""}, {"content_length": "2"}])
def test_any_other_options_is_answered_as_ever(gateway: Gateway, change: dict[str, str]) -> None:
    sent = {"origin": PAGE, "access-control-request-method": "POST"}
    sent |= {name.replace("_", "-"): value for name, value in change.items()}
    body = b"{}" if "content_length" in change else None
    headers = {name: value for name, value in sent.items() if value}
    response = httpx.request("OPTIONS", f"{gateway.base}/chat/completions", headers=headers, content=body)
    assert response.status_code == 405 and response.headers["allow"] == "POST"


def test_a_connection_goes_on_after_a_preflight(gateway: Gateway, client: httpx.Client) -> None:
    headers = {"origin": PAGE, "access-control-request-method": "POST"}
    assert client.options("/chat/completions", headers=headers).status_code == 204
    assert ask(client).status_code == 200


def readable(response: httpx.Response, origin: str = "*") -> None:
    assert response.headers["access-control-allow-origin"] == origin
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-should-retry", "server-timing"} <= set(exposed)
    ours = ("x-ratelimit-", "x-request", "x-should", "x-queue", "server-timing", "retry-after", "idempotency-")
    assert {name for name in response.headers if name.startswith(ours)} <= set(exposed)
    assert "access-control-allow-credentials" not in response.headers
    assert response.headers.get_list("access-control-allow-origin") == [origin]


def test_every_answer_can_be_read(gateway: Gateway, client: httpx.Client) -> None:
    client.headers["origin"] = PAGE
    stream = ask(client, stream=True)
    assert len(events(stream.text)) > 2 and stream.text.endswith("data: [DONE]\n\n")
    large = client.post("/chat/completions", content=b"x" * 5_000_000, headers={"content-type": "application/json"})
    unknown = httpx.post(f"{gateway.base}/chat/completions", json=ASK, headers={"origin": PAGE})
    answers = [
        (ask(client), 200),
        (stream, 200),
        (client.get("/models"), 200),
        (unknown, 401),
        (ask(client, max_tokens=0), 400),
        (client.post("/nothing", json={}), 404),
        (client.get("/chat/completions"), 405),
        (large, 413),
    ]
    for response, status in answers:
        assert response.status_code == status
        readable(response)


def test_without_an_origin_nothing_is_added(client: httpx.Client) -> None:
    response = ask(client)
    assert cors_of(response) == {} and "vary" not in response.headers


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/nothing"])
def test_what_is_outside_of_the_api_stays_closed(gateway: Gateway, path: str) -> None:
    root = gateway.base.removesuffix("/v1")
    headers = {"origin": PAGE, "access-control-request-method": "GET"}
    assert cors_of(httpx.get(root + path, headers=headers)) == {}
    refused = httpx.options(root + path, headers=headers)
    assert refused.status_code in (404, 405) and cors_of(refused) == {}


def test_a_listed_origin(listed: Gateway) -> None:
    allowed = preflight(listed)
    assert allowed.status_code == 204 and allowed.headers["access-control-allow-origin"] == PAGE
    assert "origin" in allowed.headers["vary"].split(", ")
    with listed.client(follow_redirects=False) as client:
        for origin in (PAGE, f"{OTHER}:8443"):
            client.headers["origin"] = origin
            for response in (ask(client), ask(client, stream=True), client.get("/nothing")):
                readable(response, origin)
                assert response.headers["vary"] == "origin"


@pytest.mark.parametrize("origin", [OTHER, "http://app.example", f"{PAGE}.evil.example", f"{PAGE}:444", "null", "*"])
def test_an_origin_that_is_not_listed(listed: Gateway, origin: str) -> None:
    refused = preflight(listed, origin=origin)
    assert refused.status_code == 405 and cors_of(refused) == {}
    with listed.client() as client:
        response = client.get("/models", headers={"origin": origin})
    assert response.status_code == 200 and cors_of(response) == {} and response.headers["vary"] == "origin"


def test_a_cache_learns_that_the_origin_matters_also_where_there_is_none(listed: Gateway) -> None:
    with listed.client() as client:
        response = client.get("/models")
    assert cors_of(response) == {} and response.headers["vary"] == "origin"


def test_an_empty_setting_switches_it_off(closed: Gateway) -> None:
    refused = preflight(closed)
    assert refused.status_code == 405 and cors_of(refused) == {}
    with closed.client() as client:
        response = ask(client, stream=True)
        assert cors_of(client.get("/models", headers={"origin": PAGE})) == {}
    assert response.status_code == 200 and cors_of(response) == {}


@pytest.mark.parametrize("value", ["app.example", "https://app.example/path", "https://*.example"])
def test_a_setting_that_would_match_no_origin_is_refused(stack: Any, value: str) -> None:
    environment = {**stack.environment, "SLUICE_CORS_ORIGINS": value}
    code = "import gateway.settings"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "SLUICE_CORS_ORIGINS" in done.stderr
