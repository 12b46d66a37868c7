"""One stack on the real model for the session; lifecycle tests make their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Short, for the sockets' sake, and gone afterwards with whatever still works on it."""
    path = Path(tempfile.mkdtemp(prefix="sle-"))
    path.chmod(0o711)  # a closed parent would send root's servers to /var/lib
    yield path
    Stack(path).kill_all()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def stack(model_file: Path) -> Iterator[Stack]:
    """The product as `sluice up --detach` starts it, with the real model."""
    path = Path(tempfile.mkdtemp(prefix="sle-"))
    (path / "models").mkdir()
    for file in model_file.parent.glob(f"{model_file.name}*"):
        shutil.copy2(file, path / "models" / file.name)
    stack = Stack(path)
    try:
        stack.up()
        yield stack
        stack.down()
        assert not stack.processes()
    finally:
        stack.kill_all()
        kept = os.environ.get("SLUICE_E2E_KEEP_LOGS")
        if kept:
            shutil.copytree(path / "logs", kept, dirs_exist_ok=True)
        shutil.rmtree(path, ignore_errors=True)
