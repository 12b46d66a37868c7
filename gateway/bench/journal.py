"""Finished runs, one a line of JSON, written at once: an interruption loses nothing and a rerun goes on from there."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

__all__ = ["Journal"]


class Journal:
    """Of one set of settings: runs of others in the same file are kept and not seen."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, orjson.loads(orjson.dumps(settings))
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
