"""A server with real models for the clients' tests: one that runs already, or one started for the session."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.stack import Stack

_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_SETTINGS = {
    "SLUICE_CORS_ORIGINS": ",".join(f"http://{host}{port}" for host in _HOSTS for port in ("", ":3000", ":8080"))
}
"""What llama.cpp's tests set by flags."""
_GIVEN = {name: os.environ.get(f"CONFORMANCE_{name}", "") for name in ("BASE", "KEY")}


@dataclass(frozen=True)
class Served:
    """Where a client finds it."""

    base: str
    key: str
    model: str = "smollm2-135m"
    embedding_model: str = "all-minilm-l6-v2"


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """`CONFORMANCE_BASE` and `CONFORMANCE_KEY`, or `sluice up --embeddings` on a folder of its own."""
    if all(_GIVEN.values()):
        yield Served(_GIVEN["BASE"], _GIVEN["KEY"])
        return
    files: list[Path] = [request.getfixturevalue("model_file"), request.getfixturevalue("embedding_model")]
    folder = Path(tempfile.mkdtemp(prefix="slc-"))
    folder.chmod(0o711)  # a closed parent would send root's servers to /var/lib
    shutil.copytree(files[0].parent, folder / "models")
    if files[1].parent != files[0].parent:
        shutil.copytree(files[1], folder / "models" / files[1].name)
    stack = Stack(folder, options=("--embeddings",), more=_SETTINGS)
    try:
        line = stack.up()
        yield Served(line["api_base"], line["tenants"]["alpha"]["key"], line["model"], line["embedding_model"])
        stack.down()
    finally:
        stack.kill_all()
        shutil.rmtree(folder, ignore_errors=True)
