"""The demonstration record: made once, its secrets only shown once."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import authenticate
from django.core.management import CommandError, call_command

from gateway.local.folder import DataFolder
from tenants import demo, keys
from tenants.billing.selectors import load_price_facts
from tenants.models import AuditEvent
from tenants.principals import load_principal


def seed(*options: str) -> dict[str, Any]:
    out = StringIO()
    call_command("seed_demo", "--json", *options, stdout=out)
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    facts: dict[str, Any] = json.loads(lines[0])
    return facts


def active(text: str) -> bool:
    parsed = keys.parse(text)
    assert parsed is not None
    found = load_principal(parsed[0])
    assert found is not None
    return found[0].active


@pytest.mark.django_db
def test_seeding_twice_keeps_everything_and_rotating_replaces_the_secrets(settings: Any) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # a slow one costs 1 s a look
    first = seed()
    assert {slug: x["tier"] for slug, x in first["tenants"].items()} == {
        "alpha": "interactive",
        "beta": "standard",
        "delta": "standard",
        "gamma": "batch",
    }
    assert all(active(x["key"]) for x in first["tenants"].values())
    assert authenticate(**first["admin"]) is not None
    rows = AuditEvent.objects.count()
    again = seed()
    assert again["admin"] is None and all(x["key"] is None for x in again["tenants"].values())
    assert AuditEvent.objects.count() == rows
    assert all(active(x["key"]) for x in first["tenants"].values())
    rotated = seed("--rotate")
    assert authenticate(**first["admin"]) is None and authenticate(**rotated["admin"]) is not None
    assert not any(active(x["key"]) for x in first["tenants"].values())
    assert all(active(x["key"]) for x in rotated["tenants"].values())


@pytest.mark.django_db
def test_what_is_printed_is_kept_where_up_keeps_it(settings: Any, tmp_path: Path) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.SLUICE_DATA_DIR = tmp_path
    seed()
    assert list(tmp_path.iterdir()) == []  # not a data folder of ours: elsewhere (containers) nothing is written down
    folder = DataFolder(tmp_path)
    folder.open()
    folder.write(folder.credentials, {"api_base": "http://127.0.0.1:1/v1"})
    rotated = seed("--rotate")
    kept = folder.read(folder.credentials)
    assert kept == {"api_base": "http://127.0.0.1:1/v1", **rotated}
    seed()
    assert folder.read(folder.credentials) == kept  # nothing new: what was made earlier stays
    assert authenticate(**kept["admin"]) is not None
    assert all(active(x["key"]) for x in kept["tenants"].values())


@pytest.mark.django_db
def test_the_credentials_of_another_database_are_not_overwritten(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.SLUICE_DATA_DIR = tmp_path
    folder = DataFolder(tmp_path)
    folder.open()
    folder.write(folder.environment, {"DATABASE_URL": "postgresql:///folders"})
    kept = {"tenants": {"alpha": {"key": "sk-of-the-folder"}}}
    folder.write(folder.credentials, kept)
    monkeypatch.setenv("DATABASE_URL", "postgresql:///another")
    rows = AuditEvent.objects.count()
    with pytest.raises(CommandError, match="SLUICE_DATA_DIR"):
        seed("--rotate")
    assert folder.read(folder.credentials) == kept and AuditEvent.objects.count() == rows
    monkeypatch.setenv("DATABASE_URL", "postgresql:///folders")
    assert seed()["tenants"]["alpha"]["key"] == folder.read(folder.credentials)["tenants"]["alpha"]["key"]


@pytest.mark.django_db
def test_a_price_that_an_older_version_did_not_make_is_added(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    older = {name: rates for name, rates in demo.PRICES.items() if name != "all-minilm-l6-v2"}
    with monkeypatch.context() as before:
        before.setattr(demo, "PRICES", older)
        seed()
    now = datetime.now(UTC)
    default = load_price_facts("all-minilm-l6-v2", now)
    assert default is not None and default == load_price_facts("default", now)
    seed()
    price = load_price_facts("all-minilm-l6-v2", now)
    assert price is not None and (price.input_nano_per_mtok, price.output_nano_per_mtok) == (20_000_000, 0)
    assert load_price_facts("default", now) == default
