"""Signing in: throttled, tight-lipped, by form only."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.hashers import make_password
from django.test import Client

from frontend import attempts
from frontend.attempts import BY_ADDRESS, BY_ADDRESS_AND_NAME, WINDOW_S
from tenants.models import User

from .conftest import PASSWORD, People

pytestmark = pytest.mark.usefixtures("prefix")
WRONG = "not it"
MISMATCH = "That user name and password don&#x27;t match an account."


@pytest.fixture(autouse=True)
def _quick_hashes(people: People, settings: Any) -> None:
    """Dozens of attempts are made here, and each is as slow as a hash is made to be."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    User.objects.update(password=make_password(PASSWORD))
    people.admin.refresh_from_db()


def attempt(name: str, password: str = WRONG, address: str = "192.0.2.1") -> Any:
    return Client(REMOTE_ADDR=address).post("/login/", {"username": name, "password": password})


def test_the_right_password_leads_to_where_one_wanted_to_go(people: People) -> None:
    client = Client()
    asked = client.get("/requests/?before=")
    assert (asked.status_code, asked["Location"]) == (302, "/login/?next=/requests/%3Fbefore%3D")
    page = client.get(asked["Location"])
    assert 'name="next" value="/requests/?before="' in page.content.decode()
    done = client.post("/login/", {"username": "admin", "password": PASSWORD, "next": "/requests/"})
    assert (done.status_code, done["Location"]) == (302, "/requests/")
    assert client.get("/requests/").status_code == 200
    assert client.get("/login/")["Location"] == "/"


def test_nobody_is_sent_to_another_site(people: People) -> None:
    client = Client()
    done = client.post("/login/", {"username": "admin", "password": PASSWORD, "next": "https://evil.example/"})
    assert done["Location"] == "/"


def test_every_failure_says_the_same(people: People) -> None:
    people.stranger.is_active = False
    people.stranger.save()
    for name, password in (("admin", "wrong"), ("nobody", "wrong"), ("sam", PASSWORD)):
        response = attempt(name, password)
        assert MISMATCH in response.content.decode()
        assert "sessionid" not in response.cookies
    assert "Enter a user name and a password." in attempt("", "").content.decode()


def test_guessing_is_stopped_even_with_the_right_password(people: People) -> None:
    for _ in range(BY_ADDRESS_AND_NAME):
        assert attempt("admin").status_code == 200
    blocked = attempt("admin", PASSWORD)
    assert blocked.status_code == 429
    assert 0 < int(blocked["Retry-After"]) <= WINDOW_S
    assert "Too many failed attempts. Try again in 5 minutes." in blocked.content.decode()
    assert "sessionid" not in blocked.cookies
    # Spelling the name otherwise is no way round; another address, or another person here, is not locked out.
    assert attempt(" ADMIN ").status_code == 429
    assert attempt("admin", PASSWORD, address="192.0.2.2").status_code == 302
    assert attempt("olive", PASSWORD).status_code == 302


def test_a_success_clears_ones_own_slips(people: People) -> None:
    for _ in range(3):
        for _ in range(BY_ADDRESS_AND_NAME - 1):
            assert attempt("admin").status_code == 200
        assert attempt("admin", PASSWORD).status_code == 302


def test_many_names_from_one_address_are_stopped_too(people: People) -> None:
    for index in range(BY_ADDRESS):
        assert attempt(f"name-{index}").status_code == 200
    assert attempt("admin", PASSWORD).status_code == 429


def test_the_window_does_not_move_with_every_attempt(people: People, redis: Any, prefix: str) -> None:
    attempt("admin")
    keys = list(redis.scan_iter(match=f"{prefix}signin:*"))
    assert len(keys) == 3
    for key in keys:
        redis.expire(key, 7)
    attempt("admin")
    assert {redis.ttl(key) for key in keys} <= {6, 7}
    assert not any(b"admin" in key for key in keys)


def test_without_redis_one_can_sign_in_but_not_guess(
    people: People, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = "unix:///nonexistent/redis.sock"
    monkeypatch.setattr(attempts, "_local", {})
    assert attempt("admin", PASSWORD).status_code == 302
    for _ in range(BY_ADDRESS_AND_NAME):
        assert attempt("admin").status_code == 200
    assert attempt("admin", PASSWORD).status_code == 429


def test_forms_need_their_token(people: People) -> None:
    client = Client(enforce_csrf_checks=True)
    refused = client.post("/login/", {"username": "admin", "password": PASSWORD})
    assert refused.status_code == 403
    assert "The form has expired" in refused.content.decode()


def test_signing_out_is_a_post(people: People) -> None:
    client = Client()
    client.force_login(people.admin)
    assert client.get("/logout/").status_code == 405
    assert client.get("/requests/").status_code == 200
    assert client.post("/logout/")["Location"] == "/login/"
    assert client.get("/requests/").status_code == 302
