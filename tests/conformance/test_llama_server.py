"""llama.cpp's own server tests, asked of Sluice through the stand-in: what passed goes on to pass.

`llama_server.json` lists them, those that fail with the reason, and those that `llama-server` itself fails with the
same language model in the place of all that its fixtures fetch. `CONFORMANCE_LLAMA_TESTS` names their folder
(`vendor/llama.cpp/tools/server/tests` of `llama-cpp-python`'s source distribution). With `LLAMA_SERVER`, a
`llama-server` or `llama_library.py`, that is measured anew.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.conformance.conftest import Served

HERE = Path(__file__).parent
FOLDER = os.environ.get("CONFORMANCE_LLAMA_TESTS", "")
SERVER = os.environ.get("LLAMA_SERVER", "")
NEEDED = ("filelock", "openai", "requests", "wget")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
KNOWN: dict[str, Any] = json.loads((HERE / "llama_server.json").read_bytes())
PASSES: list[str] = KNOWN["passes"]
FAILS: list[str] = [name for names in KNOWN["fails"].values() for name in names]
THEIR_FAILS: list[str] = KNOWN["llama_server_fails"]
WANTED = 85
HANGS_S = 600
"""A single test of theirs that takes longer has failed, on whatever machine."""


def runs(test: Any) -> Any:
    """Marks of those that run llama.cpp's tests."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.timeout(7200),
        pytest.mark.skipif(not FOLDER, reason="CONFORMANCE_LLAMA_TESTS names no folder of llama.cpp's server tests"),
        pytest.mark.skipif(bool(MISSING), reason=f"llama.cpp's server tests need {', '.join(MISSING)}"),
    ):
        test = mark(test)
    return test


def passed(stand_in: str, environment: Mapping[str, str], names: Sequence[str], folder: Path) -> set[str]:
    """Those of the named tests that pass with this program in the place of `llama-server`."""
    listed, report = folder / "names", folder / "report.xml"
    listed.write_text("\n".join(names))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = ["-p", "no:cacheprovider", "-q", f"--timeout={HANGS_S}", f"--junitxml={report}", f"@{listed}"]
    settings = {**os.environ, "PATH": path, "LLAMA_SERVER_BIN_PATH": str(HERE / stand_in), **environment}
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=FOLDER, env=settings)
    cases = ElementTree.parse(report).getroot().iter("testcase")  # noqa: S314  (written by pytest)
    good = [case for case in cases if not list(case.iterfind("*[@message]"))]
    return {f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in good}


def test_each_case_is_listed_once() -> None:
    listed = PASSES + FAILS
    assert len(listed) == len(set(listed)) and set(THEIR_FAILS) < set(listed)


def test_enough_of_what_llama_server_passes_is_listed_as_passing() -> None:
    assert len(set(PASSES) - set(THEIR_FAILS)) >= WANTED


@runs
def test_what_passed_passes(served: Served, unused_tcp_port: int, tmp_path: Path) -> None:
    where = {"SLUICE_BASE": served.base, "SLUICE_KEY": served.key, "PORT": str(unused_tcp_port)}
    models = {"SLUICE_MODEL": served.model, "SLUICE_EMBEDDING_MODEL": served.embedding_model}
    assert set(PASSES) - passed("llama_server.py", where | models, PASSES, tmp_path) == set()


@runs
@pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no llama-server")
def test_enough_of_what_llama_server_passes_passes(model_file: Path, unused_tcp_port: int, tmp_path: Path) -> None:
    # One thread: two that wait for each other are slow on a machine that is busy.
    where = {"LLAMA_MODEL": str(model_file), "PORT": str(unused_tcp_port), "LLAMA_ARG_THREADS": "1"}
    theirs = passed("local_model.py", where, PASSES + FAILS, tmp_path)
    rest = {why: sorted(theirs & set(names)) for why, names in KNOWN["fails"].items() if theirs & set(names)}
    assert len(theirs & set(PASSES)) >= WANTED, rest
