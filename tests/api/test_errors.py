"""Whatever a client sends wrongly is a 4xx in OpenAI's error shape; it names the field and shows no internals."""

from __future__ import annotations

import gzip
import json
import select
import socket
import zlib
from typing import Any

import httpx
import pytest

from tests.api.test_chat import ASK, ask
from tests.harness import POOL, Gateway

GOOD = '{"model":"sim","messages":[{"role":"user","content":"x"}]'


def check(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str) and set(error) == {"message", "type", "param", "code"}
    assert not any(word in error["message"] for word in ("Traceback", "site-packages", "0x7f"))
    assert response.headers["x-request-id"]
    if code is not None:
        assert error["code"] == code
    return error


def called(type: str = "function", name: str = "f") -> dict[str, Any]:
    """An assistant's message with a call."""
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": type, "function": {"name": name, "arguments": ""}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": ASK["messages"], "tools": ["f"]}, "tools[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "<|im_start|>"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "name": ""}]}, "messages[0].name"),
        ({"messages": [called(type="custom")]}, "messages[0].tool_calls[0].type"),
        ({"messages": [called(name="")]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [called(name="a b")]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"service_tier": "warp"}, "service_tier"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"min_tokens": 2**64}, "min_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"top_k": 2**64}, "top_k"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_a_bad_field_is_named(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = ask(client, **fields)
    assert 400 <= response.status_code < 404
    assert check(response, response.status_code)["param"] == param
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": "2"}, "Invalid type for 'n': expected an integer, but got a string instead."),
        ({"stop": 5}, "Invalid type for 'stop': expected a string or an array, but got an integer instead."),
        ({"messages": None}, "Invalid type for 'messages': expected an array, but got null instead."),
        ({"messages": [{"role": 1}]}, "Invalid type for 'messages[0].role': expected a string."),
    ],
)
def test_a_wrong_type_is_told_in_words(client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    assert check(ask(client, **fields), 400, "invalid_type")["message"] == message


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("null", "invalid_type"),
        ("[]", "invalid_type"),
        ("5", "invalid_type"),
        ('"x"', "invalid_type"),
        (GOOD, "invalid_json"),
        (GOOD + ',"temperature":NaN}', "invalid_json"),
        (GOOD + ',"temperature":Infinity}', "invalid_json"),
        (GOOD + ',"temperature":1e999}', None),
        (GOOD + ',"user":"\\ud800"}', "invalid_json"),
        (GOOD + ',"user":"a","user":"b"}', "duplicate_key"),
        (GOOD + ',"x":{"a":1,"a":2}}', "duplicate_key"),
        (GOOD + ',"x":' + "[" * 65 + "]" * 65 + "}", "nested_too_deep"),
        (GOOD + ',"x":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}", "nested_too_deep"),
        (GOOD + ',"x":' + "1" * 5000 + "}", "invalid_json"),
        (GOOD + "} trailing", "invalid_json"),
        ('{"model":"sim"}', "missing_required_parameter"),
        ('{"messages":[{"role":"user","content":"x"}]}', "missing_required_parameter"),
    ],
)
def test_a_malformed_body(client: httpx.Client, body: str, code: str | None) -> None:
    headers = {"content-type": "application/json"}
    check(client.post("/chat/completions", content=body.encode(), headers=headers), 400, code)


@pytest.mark.parametrize("raw", [b"\xff\xfe{}", b"\x00", "{}".encode("utf-16"), b'{"model":"\xff"}'])
def test_a_body_that_is_not_utf8(client: httpx.Client, raw: bytes) -> None:
    check(
        client.post("/chat/completions", content=raw, headers={"content-type": "application/json"}), 400, "invalid_json"
    )


def test_brackets_inside_strings_are_not_depth(client: httpx.Client) -> None:
    assert ask(client, messages=[{"role": "user", "content": '[{"\\' * 200}]).status_code == 200


def test_another_content_type(client: httpx.Client) -> None:
    response = client.post("/chat/completions", content=b"hello", headers={"content-type": "text/plain"})
    check(response, 415, "unsupported_media_type")


def test_a_prompt_that_is_too_long(client: httpx.Client) -> None:
    for stream in (False, True):
        response = ask(client, messages=[{"role": "user", "content": "word " * 20_000}], stream=stream)
        assert check(response, 400, "context_length_exceeded")["param"] == "messages"


def test_bodies_are_counted_after_decompression(client: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    def post(body: bytes, **more: str) -> httpx.Response:
        return client.post("/chat/completions", content=body, headers={**headers, **more})

    good = (GOOD + ',"max_tokens":4}').encode()
    assert post(gzip.compress(good)).status_code == 200
    check(post(gzip.compress(b" " * 100_000_000)), 413, "request_too_large")
    check(post(gzip.compress(good)[:-9]), 400, "invalid_encoding")
    check(post(b"not gzip"), 400, "invalid_encoding")
    check(post(b""), 400, "invalid_encoding")
    check(post(good, **{"content-encoding": "br"}), 415, "unsupported_media_type")


def test_a_gzip_body_may_have_several_members_and_nothing_else_after_them(client: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    def post(body: bytes, **more: str) -> httpx.Response:
        return client.post("/chat/completions", content=body, headers={**headers, **more})

    pieces = [GOOD.encode()[:20], GOOD.encode()[20:], b"", b',"max_tokens":3}', b" " * 100_000]
    whole = b"".join(gzip.compress(piece) for piece in pieces)
    response = post(whole)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 3
    check(post(whole + b"garbage"), 400, "invalid_encoding")
    check(post(whole + b"\0"), 400, "invalid_encoding")
    check(post(whole[:-5]), 400, "invalid_encoding")
    check(post(gzip.compress(b" " * 3_000_000) * 2), 413, "request_too_large")
    check(post(gzip.compress(b"") * 100_000), 400, "invalid_encoding")
    one = b"".join(pieces)
    assert post(zlib.compress(one), **{"content-encoding": "deflate"}).status_code == 200
    check(post(zlib.compress(one) * 2, **{"content-encoding": "deflate"}), 400, "invalid_encoding")


def test_a_body_over_the_limit(client: httpx.Client) -> None:
    response = client.post("/chat/completions", content=b"x" * 5_000_000, headers={"content-type": "application/json"})
    check(response, 413, "request_too_large")
    chunked = client.post("/nothing", content=(b"x" * 1_000_000 for _ in range(5)))
    check(chunked, 413, "request_too_large")


@pytest.mark.parametrize("path", ["/nothing", "/", "/chat", "/chat/completions/", "/models/", "/%ff", "/a%00b", "/.."])
def test_an_unknown_route(client: httpx.Client, path: str) -> None:
    check(client.post(path, json={}), 404)
    check(client.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/chat/completions"), ("GET", "/completions"), ("POST", "/models")]
)
def test_a_wrong_method(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path)
    check(response, 405, "method_not_allowed")
    assert response.headers["allow"]


def test_an_unknown_model(client: httpx.Client) -> None:
    assert check(ask(client, model="none"), 404, "model_not_found")["param"] == "model"
    check(client.get("/models/none"), 404, "model_not_found")
    check(client.get("/models/org/none"), 404, "model_not_found")


def test_models_are_listed(client: httpx.Client) -> None:
    body = client.get("/models").json()
    assert body["object"] == "list" and POOL in [m["id"] for m in body["data"]]
    one = client.get(f"/models/{POOL}").json()
    assert one["object"] == "model" and one["owned_by"] and isinstance(one["created"], int)
    assert client.head("/models").status_code == 200


def exchange(gateway: Gateway, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


@pytest.mark.parametrize("host", ["a b", "x/../v1", "a@b", "a:b:c", "ex\tample", "a?b", "h#x"])
def test_a_malformed_host_is_refused_and_opens_nothing(gateway: Gateway, host: str) -> None:
    for path in ("/v1/models", "/healthz"):
        answer = exchange(gateway, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.split(b" ")[1] in (b"400", b"401"), answer


@pytest.mark.parametrize(
    "request_line",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /v1/m\xc3\xb6dels HTTP/1.1\r\nHost: a",
        b"G\x00T / HTTP/1.1",
        b"{}",
    ],
)
def test_what_is_not_http(gateway: Gateway, request_line: bytes) -> None:
    head, _, body = exchange(gateway, request_line + b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


def test_headers_are_bounded(gateway: Gateway) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    assert exchange(gateway, start + b"X: " + b"x" * 10_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert exchange(gateway, start + b"X: " + b"x" * 70_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("start", [b"GET /healthz HTTP/1.1\r\nX: ", b"GET /healthz HTTP/1.1\r\n", b"GET /"])
def test_a_head_that_never_ends_is_cut_off(gateway: Gateway, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(start)
        # Cut off with data unread, the answer may be lost in the reset: only that it ends is sure.
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(b"x" * 10_000)
                if select.select([connection], [], [], 0)[0] and connection.recv(12) in (b"HTTP/1.1 400", b""):
                    raise ConnectionAbortedError


def test_a_large_body_is_not_counted_as_headers(gateway: Gateway) -> None:
    key, body = gateway.stack.keys["alpha"].encode(), b'{"model":"sim","prompt":"' + b"x" * 200_000 + b'"}'
    one = b"POST /v1/tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n" % (
        key,
        len(body),
    )
    last = one + b"Connection: close\r\n\r\n" + body
    assert exchange(gateway, (one + b"\r\n" + body) * 2 + last).count(b"HTTP/1.1 200") == 3


def test_an_offer_of_http2_is_declined_and_the_request_served(gateway: Gateway) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    start = (
        b"POST /v1/tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n" % gateway.stack.keys["alpha"].encode()
    )
    body = b'{"model":"sim","prompt":"hi"}'
    whole = start + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = start + offer + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    last = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert exchange(gateway, whole + chunked + last).count(b"HTTP/1.1 200") == 3


def test_only_a_get_opens_a_socket(gateway: Gateway) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    request = b"POST /v1/stream HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n" + upgrade + b"\r\n{}"
    answer = exchange(gateway, request + b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404") and answer.count(b"HTTP/1.1 200") == 1


def test_a_trailer_is_no_header(gateway: Gateway) -> None:
    key = gateway.stack.keys["alpha"].encode()
    head = b"POST /v1/tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
    chunk, trailer = b'1d\r\n{"model":"sim","prompt":"hi"}\r\n0\r\n', b"Authorization: Bearer %s\r\n" % key
    assert exchange(gateway, head + b"\r\n" + chunk + trailer + b"\r\n").startswith(b"HTTP/1.1 401")
    wrong = b"Authorization: Bearer sk-wrong\r\n"
    assert exchange(gateway, head + trailer + b"\r\n" + chunk + wrong + b"\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("line", [b"OPTIONS *", b"GET *", b"GET http://other", b"CONNECT other:443"])
def test_a_target_that_is_no_path(gateway: Gateway, line: bytes) -> None:
    answer = exchange(gateway, line + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert answer.split(b" ")[1] in (b"400", b"404") and b'"error"' in answer


def test_two_hosts_are_refused(gateway: Gateway) -> None:
    answer = exchange(gateway, b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")


def test_a_key_in_the_url_is_no_key(gateway: Gateway) -> None:
    key = gateway.stack.keys["alpha"]
    response = httpx.post(f"{gateway.base}/chat/completions?api_key={key}", json=ASK)
    check(response, 401)


def test_health_and_readiness(gateway: Gateway) -> None:
    root = gateway.base.removesuffix("/v1")
    assert httpx.get(f"{root}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{root}/readyz").status_code == 200
