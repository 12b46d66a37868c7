"""What llama.cpp's arithmetic on a quantised file loses, by its own tool: KL divergence from the same weights in fp32.

`llama-perplexity` cuts the text into chunks and compares the second half of each. It keeps the reference's
log-probabilities in 16 bits, so that differences below about 1e-4 are not seen.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gateway.bench.client import Unreachable
from gateway.bench.server import finished
from gateway.bench.stacks import Place

__all__ = ["make_text", "measure"]

CONTEXT = 512
CHARACTERS = 12_000
"""About 3,000 tokens: five chunks of 512."""
FIGURES = {"mean": "Mean", "p99": r"99\.0%", "max": "Maximum"}


def make_text(files: Sequence[Path], target: Path) -> str:
    """The beginning of these files, equal parts, as one text; also written to `target`, for others to measure on."""
    each = CHARACTERS // len(files)
    text = "\n\n".join(file.read_text("utf-8")[:each] for file in files)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return text


async def measure(place: Place, text: Path, stop: asyncio.Event | None = None) -> dict[str, Any]:
    """Mean, 99th percentile and largest KL divergence over the text. Raises Unreachable with what the tool said."""
    tool = str(place.peers.llama("llama-perplexity"))
    run = partial(finished, stop=stop)
    exact, base = place.work / "models" / f"{place.model.stem}-f32.gguf", place.work / "kl-base.bin"
    if not await asyncio.to_thread(exact.exists):
        await asyncio.to_thread(exact.parent.mkdir, parents=True, exist_ok=True)
        await run([sys.executable, "-m", "engine.models.export", str(place.model), "--gguf", str(exact)])
    threads = ["-t", str(place.threads), "-c", str(CONTEXT), "-b", str(CONTEXT)]
    # The reference keeps its KV memory in float32 too; the quantised run has llama.cpp's defaults, as users do.
    full = ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    await run([tool, "-m", str(exact), "-f", str(text), *threads, *full, "--kl-divergence-base", str(base)])
    command = [tool, "-m", str(place.model), *threads, "--kl-divergence-base", str(base), "--kl-divergence"]
    said = await run([*command, "-f", str(text)])
    return {"positions_per_chunk": CONTEXT - 1 - CONTEXT // 2, **parse(said)}


def parse(said: str) -> dict[str, float]:
    """The figures in what the tool printed. Raises Unreachable when they aren't there."""
    found = {}
    for name, label in FIGURES.items():
        match = re.search(rf"^{label}\s+KLD:\s+(-?[\d.]+)", said, re.MULTILINE)
        if match is None:
            raise Unreachable(f"llama-perplexity printed no {name} KL divergence:\n{said[-1500:]}")
        found[name] = float(match[1])
    return found
