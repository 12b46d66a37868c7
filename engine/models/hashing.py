"""Content hashes of model files, remembered beside the file so that a large model is read once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

__all__ = ["file_sha256"]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file. The memory is keyed by size and modification time; it is skipped where it can't be written."""
    stat = path.stat()
    key = [stat.st_size, stat.st_mtime_ns]
    memory = path.with_name(f".{path.name}.sha256.json")
    try:
        known = json.loads(memory.read_text())
        if known["key"] == key:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        memory.write_text(json.dumps({"key": key, "sha256": digest}))
    except OSError:
        pass
    return digest
