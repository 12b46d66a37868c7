"""`python -m engine.models.loss`: what int8 (or bf16) costs in exactness, as KL divergence from fp32 over a text.

The measure of `llama-perplexity --kl-divergence`: texts are cut in chunks of `--context` tokens, and the second half of
each chunk counts, so that every position has a context.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from engine.attention import HeadShape, KVStore, PagedBatch, choose_kernels
from engine.models import Checkpoint, open_checkpoint
from engine.models.architectures import Decoder, build_decoder

__all__ = ["TEXTS", "Loss", "losses"]

TEXTS = [
    "The harbour master wrote down every ship that came in before noon, and by the end of the week he had filled",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return ordered[middle]\n",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. The reaction takes place in the",
    "Q: A train leaves at 14:35 and needs 2 hours and 50 minutes. When does it arrive?\nA: It arrives at",
    "Der alte Leuchtturm stand seit zweihundert Jahren auf dem Felsen, und niemand wusste mehr, wer ihn",
    '{"order": 4711, "items": [{"name": "screw M4", "count": 200}, {"name": "nut M4", "count": 200}], "paid":',
]
_BLOCK = 16
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Loss:
    """KL(fp32 || other) of the next token at each position, and how often the first choice is the same."""

    nats: Tensor
    same_first: float

    def facts(self) -> dict[str, float]:
        ordered = self.nats.sort().values
        return {
            "positions": len(ordered),
            "mean": float(ordered.mean()),
            "median": float(ordered.median()),
            "p99": float(ordered.quantile(0.99)),
            "largest": float(ordered[-1]),
            "same_first": self.same_first,
        }


def losses(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    *,
    dtype: str = "bf16",
    quantization: str = "int8",
    context: int = 0,
) -> Loss:
    """All positions of the texts; with a `context`, those of the second half of every chunk of so many tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.text.tokenizer)
    ids = [tokenizer.encode(text).ids for text in texts]
    if context:
        ids = [one[at : at + context] for one in ids for at in range(0, len(one) - context + 1, context)]
    exact = _decoder(checkpoint, torch.float32, "none")
    other = _decoder(checkpoint, _DTYPES[dtype], quantization)
    nats, same = [], []
    for one in ids:
        first = len(one) // 2 if context else 0
        wanted, ours = (_logits(model, one, first).log_softmax(-1) for model in (exact, other))
        nats.append((wanted.exp() * (wanted - ours)).sum(-1))
        same.append((wanted.argmax(-1) == ours.argmax(-1)).float())
    return Loss(torch.cat(nats), float(torch.cat(same).mean()))


def _decoder(checkpoint: Checkpoint, dtype: torch.dtype, quantization: str) -> Decoder:
    config = checkpoint.config
    shape, widths = HeadShape(config.heads, config.kv_heads, config.head_dim), (config.hidden, config.intermediate)
    threads = torch.get_num_threads()
    kernels = choose_kernels("auto", dtype, shape, block_size=_BLOCK, widths=widths, threads=threads)
    return build_decoder(checkpoint, kernels, dtype, config.context_length, quantization=quantization)


@torch.inference_mode()
def _logits(model: Decoder, ids: list[int], first: int) -> Tensor:
    """Float32 [positions from `first` on, vocabulary] of one sequence."""
    blocks = -(-len(ids) // _BLOCK)
    store = KVStore(blocks, model.config.layers, model.shape, _BLOCK, model.dtype)
    places = torch.arange(len(ids))
    batch = PagedBatch(
        row_starts=torch.tensor([0, len(ids)], dtype=torch.int32),
        contexts=torch.tensor([len(ids)], dtype=torch.int32),
        tables=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
        positions=places.int(),
        slots=places,
    )
    logits = model.forward(torch.tensor(ids), batch, store, places[first:])
    if logits is None:
        raise ValueError("a text without tokens")
    return logits


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.models.loss", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--text", type=Path, help="a text file (default: six short texts, all positions)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk, with --text")
    parser.add_argument("--dtype", default="bf16", choices=list(_DTYPES), help="between the layers")
    parser.add_argument("--quantization", default="int8", choices=["none", "int8"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    texts, context = ([options.text.read_text()], options.context) if options.text else (TEXTS, 0)
    found = losses(
        open_checkpoint(options.model), texts, dtype=options.dtype, quantization=options.quantization, context=context
    )
    sys.stdout.write(json.dumps(found.facts()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
