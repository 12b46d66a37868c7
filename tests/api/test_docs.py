"""docs/api.md names every route, error code and close code there is."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.api import sockets
from gateway.api.openapi import document
from gateway.errors import CODES

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_error_code_is_listed_under_its_status() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", TEXT.partition("## Errors")[2], re.MULTILINE)
    listed = {code: statuses for statuses, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert set(CODES) == set(listed)
    for code, facts in CODES.items():
        assert str(facts.status) in listed[code], code


def test_every_route_is_described() -> None:
    for path in document()["paths"]:
        assert path in TEXT, path


def test_every_close_code_is_listed() -> None:
    for code in re.findall(r"\b(1\d{3}|4\d{3})\b", sockets.__doc__ or ""):
        assert f"| {code}" in TEXT, code
    used = set(re.findall(r"self\.close\((\d{4})\)", Path(sockets.__file__).read_text()))
    assert used <= set(re.findall(r"\| (\d{4})", TEXT))
