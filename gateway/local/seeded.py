"""What the last `seed_demo --migrate` left in the database, with the questions that tell whether it is still there.

To start Django only to find everything as it was takes two seconds of processor time. So the command leaves its
questions (SQL) with the answers in the data folder, and a start asks them itself; it has to know none of the tables.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psycopg

from gateway.local.folder import DataFolder

__all__ = ["Asked", "remember", "unchanged"]

Asked = tuple[str, Sequence[Any], Iterable[Sequence[Any]]]
"""SQL in psycopg's form, its parameters, and the rows that came."""

_CODE = Path(__file__).resolve().parents[2]


def remember(folder: DataFolder, database: str, asked: Iterable[Asked]) -> None:
    """Keep the questions with their answers. `database` is the URL that was seeded."""
    kept = [(sql, list(values), _text(rows)) for sql, values, rows in asked]
    folder.write(folder.seeded, {"code": _code(), "database": database, "asked": kept})


def unchanged(folder: DataFolder, database: str) -> bool:
    """Would migrating and seeding again change nothing? False whenever that can't be told."""
    kept = folder.read(folder.seeded)
    if kept.get("code") != _code() or kept.get("database") != database:
        return False
    try:
        with psycopg.connect(database, connect_timeout=5) as connection:
            return all(_text(connection.execute(sql, values).fetchall()) == rows for sql, values, rows in kept["asked"])
    except (psycopg.Error, LookupError, TypeError, ValueError):  # another shape, a torn file: the command finds out
        return False


def _text(rows: Iterable[Sequence[Any]]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in rows]


def _code() -> str:
    """A mark of the code that migrates and seeds: ours and Django's own tables."""
    mark = hashlib.sha256(importlib.metadata.version("django").encode())
    for file in [*sorted((_CODE / "migrations").rglob("*.py")), _CODE / "tenants" / "demo.py"]:
        mark.update(f"{file.relative_to(_CODE)}\n".encode() + file.read_bytes())
    return mark.hexdigest()
