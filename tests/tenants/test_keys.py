"""T3: a secret is never stored, only its HMAC under the server's pepper."""

from __future__ import annotations

import hashlib
import hmac
import json
import string

import pytest
from django.conf import settings
from django.core.serializers import serialize
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from tenants import keys, services
from tenants.models import ApiKey, AuditEvent
from tenants.principals import load_principal
from tests.billing.build import ACTOR, tenant


def test_a_minted_key_parses_into_its_parts_and_never_repeats() -> None:
    minted = [keys.mint() for _ in range(1000)]
    assert len({public for public, _, _ in minted}) == len({secret for _, secret, _ in minted}) == 1000
    for public, secret, text in minted:
        assert keys.parse(text) == (public, secret)
        assert len(public) == keys.PUBLIC_ID_CHARS
        assert secret not in keys.display_prefix(public)


@given(st.text(alphabet=string.printable + "\x00é٣", max_size=80))
def test_only_exact_keys_parse(text: str) -> None:
    _, _, key = keys.mint()
    for other in (text, text + key, key + text):
        if other != key:
            parsed = keys.parse(other)
            assert parsed is None or f"sk-{parsed[0]}-{parsed[1]}" == other


def test_the_digest_is_hmac_sha256_under_the_pepper() -> None:
    _, secret, _ = keys.mint()
    assert keys.digest(secret, b"pepper") == hmac.new(b"pepper", secret.encode(), hashlib.sha256).digest()
    assert keys.digest(secret, b"pepper") != keys.digest(secret, b"other")
    assert keys.matches(secret, b"pepper", keys.digest(secret, b"pepper"))
    assert not keys.matches(secret + "x", b"pepper", keys.digest(secret, b"pepper"))
    assert not keys.matches(secret, b"other", keys.digest(secret, b"pepper"))


def test_the_comparison_takes_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", spy)
    keys.matches("guess", b"pepper", bytes(32))
    assert compared == [(keys.digest("guess", b"pepper"), bytes(32))]


@pytest.mark.django_db
def test_the_secret_is_nowhere_in_the_database() -> None:
    project = services.create_project(ACTOR, tenant(), "default", "Default")
    issued = services.issue_key(ACTOR, project, "laptop")
    parsed = keys.parse(issued.text)
    assert parsed is not None
    public, secret = parsed
    stored = serialize("json", [*ApiKey.objects.all(), *AuditEvent.objects.all()])
    assert public in stored
    assert secret not in stored
    with connection.cursor() as cursor:
        cursor.execute("SELECT row_to_json(k)::text FROM tenants_apikey k")
        row = cursor.fetchone()[0]
    assert secret not in row and json.loads(row)["public_id"] == public
    found = load_principal(public)
    assert found is not None
    assert keys.matches(secret, settings.SLUICE_KEY_PEPPER, found[1])
