"""Finished runs, one a line of JSON, written at once: an interruption loses nothing and a rerun goes on from there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

__all__ = ["SOURCES", "Journal", "code_hash"]

SOURCES = tuple(Path(__file__).parents[2] / package for package in ("engine", "gateway"))
"""What is measured, and the client that measures: a change of either makes other figures."""
KINDS = frozenset((".py", ".cpp", ".lua"))


def code_hash(roots: Sequence[Path]) -> str:
    """Of all sources under these folders, their names and their text."""
    found = hashlib.sha256()
    for root in roots:
        for path in sorted(p for p in root.rglob("*") if p.suffix in KINDS):
            text = path.read_bytes()
            found.update(f"{root.name}/{path.relative_to(root)} {len(text)}\n".encode() + text)
    return found.hexdigest()[:16]


class Journal:
    """Of one set of settings and one state of the code: runs of others in the same file are kept and not seen."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = orjson.loads(orjson.dumps(settings | {"code": code_hash(SOURCES)}))
        self.runs: dict[str, dict[str, Any]] = {}
        """By key: what was found."""
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                entry = orjson.loads(line)
            except orjson.JSONDecodeError:  # cut off by a crash in the middle of writing
                continue
            if entry["settings"] == self.settings:
                self.runs[entry["key"]] = entry["found"]

    def add(self, key: str, found: dict[str, Any]) -> None:
        """Kept from now on, whatever happens."""
        entry = {
            "key": key,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": self.settings,
            "found": found,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as out:
            if out.tell():  # at the end; a crash may have cut the last line off
                out.seek(-1, 2)
                out.write(b"" if out.read() == b"\n" else b"\n")
            out.write(orjson.dumps(entry) + b"\n")
        self.runs[key] = orjson.loads(orjson.dumps(found))
