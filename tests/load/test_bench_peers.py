"""Installing the servers to compare with."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.bench.peers import PEERS

CMAKE = shutil.which("cmake")


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
def test_of_llama_cpp_only_the_programs_in_use_are_built(tmp_path: Path) -> None:
    made, source, build = (tmp_path / name for name in ("made", "a source", "build"))
    made.mkdir()

    def target(name: str) -> str:
        return f"add_custom_target({name} ALL COMMAND ${{CMAKE_COMMAND}} -E touch {made / name})\n"

    texts = {
        ".": "cmake_minimum_required(VERSION 3.14)\nproject(llama.cpp NONE)\n" + target("ggml"),
        "tools": "",
        "tools/server": target("ui") + target("llama-server") + "add_dependencies(llama-server ui)\n",
        "tools/perplexity": target("llama-perplexity"),
        "tools/quantize": target("llama-quantize"),
    }
    for folder, text in texts.items():
        below = sorted(f for f in texts if Path(f).parent == Path(folder) and f != folder)
        (source / folder).mkdir(parents=True, exist_ok=True)
        more = "".join(f"add_subdirectory({Path(f).name})\n" for f in below)
        (source / folder / "CMakeLists.txt").write_text(text + more)
    root = tmp_path / "the peers"
    root.mkdir()
    options = shlex.split(PEERS["llama"].environment(root)["CMAKE_ARGS"])
    assert CMAKE is not None
    subprocess.run([CMAKE, "-S", source, "-B", build, *options], check=True, capture_output=True)
    subprocess.run([CMAKE, "--build", build], check=True, capture_output=True)
    assert {p.name for p in made.iterdir()} == {"ggml", "ui", "llama-server", "llama-perplexity"}
