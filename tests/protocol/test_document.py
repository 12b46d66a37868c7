"""docs/protocol.md says what the code says: an engine in another language is written from it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from engine.protocol.functions import Admission, Functions
from engine.protocol.keys import Keys
from engine.protocol.messages import Delta, Final, Heartbeat, ModelCard, Outcome, Refusal, Sampling, Work

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^### {re.escape(title)}.*?(?=^##|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found.group()


@pytest.mark.parametrize("struct", [Work, Sampling, Delta, Final])
def test_the_tables_list_every_field_in_its_place(struct: type[msgspec.Struct]) -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", section(struct.__name__), re.MULTILINE)
    assert [name for _, name in rows] == list(struct.__struct_fields__)
    assert [int(number) for number, _ in rows] == list(range(len(rows)))


@pytest.mark.parametrize("struct", [ModelCard, Heartbeat, Outcome, Refusal])
def test_the_paragraphs_name_every_field_in_order(struct: type[msgspec.Struct]) -> None:
    text = section(struct.__name__)
    places = [text.find(f"`{name}`") for name in struct.__struct_fields__]
    missing = [name for name, place in zip(struct.__struct_fields__, places, strict=True) if place < 0]
    assert missing == []


def test_the_admission_names_every_field() -> None:
    assert [name for name in Admission.__dataclass_fields__ if f"`{name}`" not in section("Admission")] == []


def test_every_function_is_described() -> None:
    registered = set(re.findall(r"\{library\}_(\w+)", Functions.source().replace(Functions.library, "{library}")))
    table = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.split("## Functions")[1].split("What each")[0], re.MULTILINE))
    assert registered == table


def test_every_key_is_listed() -> None:
    keys = Keys("")
    names = {"queue": keys.queue("{pool}", "{tier}", "{member}"), "idempotency": keys.idempotency("{tenant}", "{key}")}
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name in ("prefix", *names):
            continue
        if isinstance(member, property):
            names[name] = getattr(keys, name)
        else:
            placeholders = [f"{{{p}}}" for p in inspect.signature(member).parameters if p != "self"]
            names[name] = getattr(keys, name)(*placeholders)
    names["wake"] = "wake:{pool}"
    assert [key for key in names.values() if f"`{key}`" not in DOCUMENT] == []
