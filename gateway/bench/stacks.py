"""The servers that are compared: how each is started fresh, with which threads, and stopped.

Sluice is started by its own command like any other server: nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.bench.client import Target, Unreachable, find_model
from gateway.bench.peers import Peers
from gateway.bench.server import finished, running

__all__ = ["CONTENDERS", "SLUICE", "Place", "Stack", "prepare", "serving", "sluice"]

SLUICE = (sys.executable, "-m", "gateway.cli")
CONTENDERS = {
    "sluice": "Sluice, gateway included, with the dtype it chooses here",
    "sluice-bf16": "Sluice, gateway included, bf16",
    "sluice-fp32": "Sluice, gateway included, fp32",
    "sluice-int8": "Sluice, gateway included, int8 weights and activations",
    "vllm": "vLLM's CPU build, bf16",
    "vllm-fp32": "vLLM's CPU build, float32",
    "llama": "llama.cpp's server, the GGUF file as it is",
}
SLUICE_OPTIONS = {
    "sluice": [],
    "sluice-bf16": ["--engine-options=--dtype bf16"],
    "sluice-fp32": ["--engine-options=--dtype fp32"],
    "sluice-int8": ["--quantization=int8"],
}
CONTEXT = 4096
"""Tokens a request may have at any contender: more than any prompt of the data sets with its reply."""
TENANT = "beta"
"""Who asks when nothing is said: of the standard tier, whose tokens may take 300 ms, about what the others take with 16
users. The interactive tier keeps them under 150 ms and lets prompts wait for it, which none of the others tries."""
START_S = 1800.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where fresh servers live, and what all of them share."""

    work: Path
    """Data folders, logs, converted models."""
    model: Path
    """The GGUF file."""
    port: int
    threads: int
    peers: Peers
    slots: int = 48
    """Sequences that may run at a time."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A server that answers."""

    target: Target
    keys: dict[str, str]
    """By tenant; one without a name where the server has none."""
    start_s: float
    """From the command to ready."""
    about: dict[str, Any]
    data_dir: Path | None = None


@asynccontextmanager
async def serving(name: str, place: Place, stop: asyncio.Event | None = None) -> AsyncIterator[Stack]:
    """One contender, fresh. Raises Unreachable with its log's end when it doesn't come up."""
    if name in SLUICE_OPTIONS:
        await prepare(place, stop)
        async with sluice(place, *SLUICE_OPTIONS[name], stop=stop) as stack:
            yield stack
    elif name in {"vllm", "vllm-fp32"}:
        async with _vllm(place, "float32" if name == "vllm-fp32" else "bfloat16", stop) as stack:
            yield stack
    elif name == "llama":
        async with _llama(place, stop) as stack:
            yield stack
    else:
        raise Unreachable(f"unknown contender {name!r}: use some of {', '.join(CONTENDERS)}")


async def prepare(place: Place, stop: asyncio.Event | None = None) -> None:
    """The first start of a data folder makes its database, its keys and its compiled kernels: not what is measured."""
    if not await asyncio.to_thread((place.work / "sluice-keys.json").exists):
        async with sluice(place, stop=stop):
            pass


@asynccontextmanager
async def sluice(place: Place, *options: str, stop: asyncio.Event | None = None) -> AsyncIterator[Stack]:
    """`sluice up --detach` on a data folder of the benchmark's own, and `sluice down`. Keys are made once and kept.

    Raises Unreachable when it doesn't come up, or `stop` comes first; it leaves nothing running then.
    """
    data = place.work / "sluice"
    clean = {name: "" for name in os.environ if name in {"DATABASE_URL", "REDIS_URL"}}
    ports = [f"--port={place.port}", f"--console-port={place.port + 1}", f"--data-dir={data}"]
    command = [*SLUICE, "up", "--detach", *ports, f"--model={place.model}", f"--threads={place.threads}", *options]
    began = time.monotonic()
    said = json.loads(await finished(command, clean, stop))  # which stops itself when it fails; another's is left alone
    start_s = time.monotonic() - began
    try:
        keys = _keep_keys(place.work / "sluice-keys.json", said["tenants"])
        target = Target(f"http://127.0.0.1:{place.port}", ((TENANT, keys[TENANT]),))
        target = replace(target, model=await find_model(target))
        yield Stack(target, keys, start_s, {"command": " ".join(command[2:])}, data)
    finally:
        await finished([*SLUICE, "down", f"--data-dir={data}"])


def _keep_keys(path: Path, tenants: dict[str, Any]) -> dict[str, str]:
    """A key is told once, by the `up` that made it. Raises Unreachable for a folder whose keys nobody kept."""
    found: dict[str, str] = json.loads(path.read_bytes()) if path.exists() else {}
    found |= {name: facts["key"] for name, facts in tenants.items() if facts["key"]}
    if unknown := tenants.keys() - found.keys():
        raise Unreachable(f"no keys of {', '.join(sorted(unknown))} in {path}: delete {path.parent / 'sluice'}")
    path.touch(0o600)
    path.write_text(json.dumps(found))
    return found


@asynccontextmanager
async def _vllm(place: Place, dtype: str, stop: asyncio.Event | None) -> AsyncIterator[Stack]:
    folder, name = await place.peers.folder(place.model, place.work), place.model.stem.lower()
    cores = sorted(os.sched_getaffinity(0))[: place.threads]
    command = [
        str(place.peers.vllm),
        *("serve", str(folder), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(place.port)),
        *("--dtype", dtype, "--max-model-len", str(CONTEXT), "--max-num-seqs", str(place.slots)),
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(place.threads),
        "VLLM_CACHE_ROOT": str(place.work / "vllm-cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{place.peers.vllm.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    async with _peer(place, "vllm", command, environment, stop) as stack:
        yield stack


@asynccontextmanager
async def _llama(place: Place, stop: asyncio.Event | None) -> AsyncIterator[Stack]:
    threads = str(place.threads)
    command = [
        *(str(place.peers.llama("llama-server")), "-m", str(place.model), "--alias", place.model.stem.lower()),
        *("--host", "127.0.0.1", "--port", str(place.port), "--threads", threads, "--threads-batch", threads),
        *("--parallel", str(place.slots), "--ctx-size", str(place.slots * CONTEXT), "--cont-batching", "--jinja"),
    ]
    async with _peer(place, "llama", command, {}, stop) as stack:
        yield stack


@asynccontextmanager
async def _peer(
    place: Place, kind: str, command: list[str], environment: dict[str, str], stop: asyncio.Event | None
) -> AsyncIterator[Stack]:
    base = f"http://127.0.0.1:{place.port}"
    log = place.work / "logs" / f"{kind}.log"
    told = {"command": " ".join([Path(command[0]).name, *command[1:]]), "environment": environment}
    async with running(
        command, log=log, ready=f"{base}/health", timeout_s=START_S, environment=environment, stop=stop
    ) as start_s:
        yield Stack(Target(base, model=place.model.stem.lower()), {"": ""}, start_s, told)
