"""What every page has in common: who may open it, and the headers it is sent with."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.staticfiles import finders
from django.test import Client

from .conftest import People

pytestmark = pytest.mark.usefixtures("prefix")


@pytest.mark.parametrize("path", ["/", "/requests/"])
def test_pages_ask_for_sign_in(people: People, path: str) -> None:
    response = Client().get(path)
    assert (response.status_code, response["Location"]) == (302, f"/login/?next={path}")


def test_the_push_is_refused_not_redirected() -> None:
    assert Client().get("/live/stream").status_code == 401


def test_a_disabled_user_gets_nothing(people: People) -> None:
    client = Client()
    client.force_login(people.admin)
    people.admin.is_active = False
    people.admin.save()
    assert client.get("/live/stream").status_code == 401
    assert client.get("/").status_code == 302


@pytest.mark.parametrize(
    "path", ["/login/", "/requests/", "/", "/nowhere/", "/static/console/console.css", "/live/stream"]
)
def test_every_answer_carries_the_security_headers(people: People, path: str) -> None:
    client = Client()
    if path != "/live/stream":  # signed in it would go on for ever
        client.force_login(people.admin)
    if path == "/login/":
        client.logout()
    response = client.get(path)
    policy = dict(part.split(" ", 1) for part in response["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Referrer-Policy"] == "same-origin"
    if not path.startswith("/static/"):
        assert response["X-Frame-Options"] == "DENY"
        assert "no-store" in response["Cache-Control"]


@pytest.mark.parametrize("path", ["/login/", "/requests/", "/", "/nowhere/"])
def test_pages_hold_nothing_that_the_policy_forbids(people: People, path: str) -> None:
    client = Client()
    if path != "/login/":
        client.force_login(people.admin)
    html = client.get(path).content.decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", html)
    sources = re.findall(r'<(?:script|link|img)[^>]*\s(?:src|href)="([^"]+)"', html)
    assert sources
    for source in sources:
        assert source.startswith("/static/")
        assert finders.find(source.removeprefix("/static/")), source


def test_static_files_are_cheap_to_ask_for_again(people: People) -> None:
    response = Client().get("/static/console/console.css")
    assert response["Content-Type"].startswith("text/css")
    again = Client().get("/static/console/console.css", headers={"If-None-Match": response["ETag"]})
    assert again.status_code == 304


def test_an_unknown_address_is_a_page_of_ours(people: People) -> None:
    response: Any = Client().get("/nowhere/")
    assert response.status_code == 404
    assert "There is nothing at this address" in response.content.decode()
