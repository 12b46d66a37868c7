"""No key is ever written down, whichever way it comes."""

from __future__ import annotations

import logging

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.observability.redaction import Redact, redact
from tenants.keys import mint, parse
from tests.api.test_chat import ASK
from tests.harness import Gateway


@pytest.mark.parametrize(
    "frame",
    [
        "{}",
        "Authorization: Bearer {}",
        "/v1/models?api_key={}&x=1",
        "{{'authorization': b'Bearer {}'}}",
        "x{}y",
        "[{}]",
    ],
)
def test_a_key_in_any_dress(frame: str) -> None:
    _, secret, key = mint()
    clean = redact(frame.format(key))
    assert secret not in clean and secret[:12] not in clean and "[redacted]" in clean


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://sluice:hunter2hunter2@/db?host=/run",
        "redis://user:hunter2hunter2@host:6379/0",
        "password=hunter2hunter2",
        'SECRET: "hunter2hunter2"',
        "Basic aHVudGVyMmh1bnRlcjI=",
    ],
)
def test_other_secrets(text: str) -> None:
    clean = redact(text)
    assert "hunter2" not in clean and "aHVudGVy" not in clean


def test_ordinary_text_stays() -> None:
    for text in ("request 0198 took 3.4 s", "tokens: 12", "task-0123456789", "http://host:8000/v1/models", "ask sk-"):
        assert redact(text) == text


@settings(derandomize=True, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_whatever_stands_around_it(before: str, after: str) -> None:
    _, secret, key = mint()
    assert secret not in redact(before + key + after)


def test_arguments_and_tracebacks_are_covered() -> None:
    _, secret, key = mint()
    try:
        raise ValueError(f"bad key {key}")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "for %s", (key,), (ValueError, error, error.__traceback__)
        )
    assert Redact().filter(record)
    assert secret not in logging.Formatter().format(record)


def test_a_gateway_under_full_logging_writes_no_key(stack: object, gateway: Gateway) -> None:
    other = gateway.stack.gateway("--access-log", "--log-level", "debug", SLUICE_LOG_LEVEL="DEBUG")
    key = gateway.stack.keys["alpha"]
    with other.client() as client:
        assert client.post("/chat/completions", json=ASK).status_code == 200
        client.post(f"/chat/completions?api_key={key}", json={**ASK, "messages": [{"role": "user", "content": key}]})
    httpx.post(f"{other.base}/chat/completions", json=ASK, headers={"authorization": f"Bearer {key}x"})
    other.process.stop()
    written = other.process.log.read_text()
    _, secret = parse(key) or ("", "")
    assert "api_key=[redacted]" in written and secret and secret not in written
