"""The examples of docs/api.md do what they say when they are copied: on the real model, each in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import Stack

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
CLIENT = next(code for _, code in BLOCKS if "client = OpenAI(" in code)
NOT_SERVED = ("all-minilm-l6-v2", "vit-base")
"""Models that the stack of these tests has not."""
EXAMPLES = [(k, c) for k, c in BLOCKS[1:] if c != CLIENT and not any(model in c for model in NOT_SERVED)]


def test_there_are_examples_of_both_kinds() -> None:
    kinds = [kind for kind, _ in EXAMPLES]
    assert kinds.count("sh") >= 5 and kinds.count("python") >= 8


@pytest.mark.parametrize(("kind", "code"), EXAMPLES, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(EXAMPLES)])
def test_an_example_runs(stack: Stack, kind: str, code: str) -> None:
    base, key = stack.credentials["api_base"], stack.key()
    if kind == "sh":
        # Without the option curl succeeds whatever the server says.
        command = ["bash", "-euo", "pipefail", "-c", code.replace("curl ", "curl -sS --fail-with-body ")]
    else:
        whole = code if "client." not in code else CLIENT + code
        command = [sys.executable, "-c", whole]
    command = [part.replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}").replace("sk-...", key) for part in command]
    done = subprocess.run(command, env={**os.environ, "BASE": base, "KEY": key}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() and '"error"' not in done.stdout, done.stdout[-2000:]
