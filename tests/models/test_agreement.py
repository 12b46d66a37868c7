"""Our logits against `transformers`, which reads and dequantises the GGUF file by its own code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import HeadShape, KVStore, PagedBatch, choose_kernels
from engine.models import Checkpoint, open_checkpoint
from engine.models.architectures import Decoder, build_decoder
from tests.models.prompts import LONG, SHORT

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.timeout(900)]  # minutes on a busy machine
BLOCK = 16
KEEP = 64
"""Logits are compared at the last so many positions of each prompt."""


@pytest.fixture(scope="module")
def checkpoint(model_file: Path) -> Checkpoint:
    return open_checkpoint(model_file)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.text.tokenizer)
    ids = [tokenizer.encode(text).ids for text in (*SHORT, LONG)]
    return [*ids[:-1], ids[-1][:1500]]


@pytest.fixture(scope="module")
def expected(model_file: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of the last positions of every prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read = load_gguf_checkpoint(str(model_file), return_tensors=False)["config"]
    peer = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in read.items() if not k.startswith("_")})).eval()
    tensors = load_gguf_checkpoint(str(model_file), return_tensors=True, model_to_load=peer)["tensors"]
    missing = peer.load_state_dict({k: torch.as_tensor(v) for k, v in tensors.items()}, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    peer.tie_weights()
    with torch.inference_mode():
        return [peer(torch.tensor([ids]), logits_to_keep=KEEP).logits[0] for ids in prompts]


def packed_logits(model: Decoder, prompts: list[list[int]], splits: list[int] | None = None) -> list[torch.Tensor]:
    """Logits of the last positions, from one packed forward pass; or from two, the prompts cut at `splits`."""
    counts = [-(-len(ids) // BLOCK) for ids in prompts]
    shape = HeadShape(model.config.heads, model.config.kv_heads, model.config.head_dim)
    store = KVStore(sum(counts), model.config.layers, shape, BLOCK, model.dtype)
    order = np.random.default_rng(7).permutation(sum(counts)).astype(np.int32)  # blocks of a sequence lie apart
    tables = np.zeros((len(prompts), max(counts)), np.int32)
    for row, end in enumerate(np.cumsum(counts)):
        tables[row, : counts[row]] = order[end - counts[row] : end]
    cuts = [splits, [len(ids) for ids in prompts]] if splits else [[len(ids) for ids in prompts]]
    done = [0] * len(prompts)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for ends in cuts:
        pieces = [ids[a:b] for ids, a, b in zip(prompts, done, ends, strict=True)]
        kept = [min(KEEP, len(p)) for p in pieces]
        for row, logits in enumerate(torch.split(forward(model, store, pieces, done, tables, kept), kept)):
            parts[row].append(logits)
        done = ends
    return [torch.cat(part)[-KEEP:] for part in parts]


def forward(
    model: Decoder, store: KVStore, pieces: list[list[int]], done: list[int], tables: np.ndarray, kept: list[int]
) -> torch.Tensor:
    """Logits of the last `kept[r]` tokens of each piece."""
    positions = np.concatenate([np.arange(a, a + len(p)) for a, p in zip(done, pieces, strict=True)])
    rows = np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
    slots = tables[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    batch = PagedBatch(
        row_starts=torch.tensor([0, *np.cumsum([len(p) for p in pieces])], dtype=torch.int32),
        contexts=torch.tensor([a + len(p) for a, p in zip(done, pieces, strict=True)], dtype=torch.int32),
        tables=torch.from_numpy(tables),
        positions=torch.from_numpy(positions.astype(np.int32)),
        slots=torch.from_numpy(slots),
    )
    tokens = torch.tensor([t for piece in pieces for t in piece])
    ends = np.cumsum([len(p) for p in pieces])
    wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, kept, strict=True)])
    with torch.inference_mode():
        logits = model.forward(tokens, batch, store, torch.from_numpy(wanted))
    assert logits is not None
    return logits


@pytest.fixture(scope="module", params=["reference", "cpu"])
def model(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Decoder:
    config = checkpoint.config
    shape = HeadShape(config.heads, config.kv_heads, config.head_dim)
    widths = (config.hidden, config.intermediate)
    kernels = choose_kernels(request.param, torch.float32, shape, block_size=BLOCK, widths=widths, threads=1)
    return build_decoder(checkpoint, kernels, torch.float32, 2048)


def test_each_prompt_alone(model: Decoder, prompts: list[list[int]], expected: list[torch.Tensor]) -> None:
    assert len(prompts) == 20
    assert len(prompts[-1]) == 1500
    for ids, wanted in zip(prompts, expected, strict=True):
        (logits,) = packed_logits(model, [ids])
        assert (logits - wanted).abs().max() < 1e-3


def test_a_mixed_batch_of_eight(model: Decoder, prompts: list[list[int]], expected: list[torch.Tensor]) -> None:
    for logits, wanted in zip(packed_logits(model, prompts[:8]), expected[:8], strict=True):
        assert (logits - wanted).abs().max() < 1e-3


def test_a_batch_of_chunks(model: Decoder, prompts: list[list[int]], expected: list[torch.Tensor]) -> None:
    chosen = [ids for ids in prompts if len(ids) > 3][:8]
    splits = [max(1, len(ids) * (n + 1) // 9) for n, ids in enumerate(chosen)]
    wanted = [logits for ids, logits in zip(prompts, expected, strict=True) if len(ids) > 3][:8]
    for logits, want in zip(packed_logits(model, chosen, splits), wanted, strict=True):
        assert (logits - want).abs().max() < 1e-3
