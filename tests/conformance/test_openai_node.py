"""Runs `openai_node.mjs`: the official JavaScript client against a server with real models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import Served

SCRIPT = Path(__file__).with_name("openai_node.mjs")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client installed: `OPENAI_NODE`, or a new one."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    if given := os.environ.get("OPENAI_NODE"):
        return Path(given)
    folder = tmp_path_factory.mktemp("node")
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "openai@6", "zod@4"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"npm can't install the client: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_javascript_client(served: Served, packages: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "BASE": served.base,
        "KEY": served.key,
        "MODEL": served.model,
        "EMBEDDING_MODEL": served.embedding_model,
        "OPENAI_NODE": str(packages),
    }
    done = subprocess.run(
        ["node", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=840, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [result for result in results if not result["passed"]]
    assert done.returncode == 0 and not failed and len(results) >= 13, (failed, done.stderr[-2000:])
