"""int8: weights kept as the file has them, activations in 8 bits: the loss against fp32, texts alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.attention import HeadShape, choose_kernels
from engine.backends.causal_lm import CausalLM
from engine.models import Checkpoint, ModelError, open_checkpoint
from engine.models.architectures import Decoder, build_decoder
from engine.models.linear import int8_refusal, quantised_linear, rounded_rows
from engine.models.loss import TEXTS, losses
from engine.models.rounding import as_stored, rounded
from engine.products import Blocks
from engine.text import Tokenizer
from tests.runner.driver import Driver, greedy

KL_BOUND = 0.006
"""Nats, mean over all positions of TEXTS; docs/benchmarks.md states what was measured."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other at every product."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(model_file: Path) -> Checkpoint:
    return open_checkpoint(model_file)


def decoder(checkpoint: Checkpoint, quantization: str) -> Decoder:
    config = checkpoint.config
    shape, widths = HeadShape(config.heads, config.kv_heads, config.head_dim), (config.hidden, config.intermediate)
    kernels = choose_kernels("cpu", torch.float32, shape, block_size=16, widths=widths, threads=1)
    return build_decoder(checkpoint, kernels, torch.float32, 512, quantization=quantization)


def test_loss_against_fp32(checkpoint: Checkpoint) -> None:
    found = losses(checkpoint, TEXTS, dtype="bf16")
    assert found.nats.mean() < KL_BOUND
    assert found.same_first > 0.93


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_the_numbers_of_the_file(kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    weight = np.random.default_rng(1).normal(size=(33, 96)).astype(np.float32)
    raw = gguf.quantize(weight, quantisation)
    blocks = as_stored(quantisation, raw)
    assert blocks is not None
    assert blocks.shape == (33, 96)
    torch.testing.assert_close(blocks.floats(), torch.from_numpy(gguf.dequantize(raw, quantisation)), rtol=1e-6, atol=0)
    assert as_stored(gguf.GGMLQuantizationType.Q6_K, raw) is None


def test_a_models_blocks_are_its_tensors(checkpoint: Checkpoint) -> None:
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.3.{name}.weight"
        blocks = checkpoint.blocks(name)
        assert blocks.bits == 4
        torch.testing.assert_close(blocks.floats(), checkpoint.tensor(name), rtol=1e-5, atol=1e-7)


def test_stacking_what_is_unequal_rounds_to_eight_bits() -> None:
    weight = torch.randn(16, 64)
    eight = Blocks.rounded(weight)
    assert (eight.floats() - weight).abs().max() < weight.abs().max() / 127
    four = Blocks(4, torch.randint(0, 50, (8, 40), dtype=torch.uint8))
    stacked = Blocks.stacked([four, eight])
    assert (stacked.bits, stacked.shape) == (8, (24, 64))
    assert (stacked.floats()[:8] - four.floats()).abs().max() <= four.floats().abs().max() / 127
    with pytest.raises(ModelError, match="this one: int8 is not possible: rows of 40"):
        rounded(torch.randn(2, 40), "this one")


def test_without_a_compiler_torch_multiplies_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, bias, x = Blocks.rounded(torch.randn(48, 96)), torch.randn(48), torch.randn(5, 96)
    wanted = quantised_linear(blocks, bias)(x)
    monkeypatch.setattr("engine.models.linear.open_products", lambda: None)
    torch.testing.assert_close(quantised_linear(blocks, bias)(x), wanted, rtol=1e-4, atol=1e-4)
    assert rounded_rows(torch.zeros(1, 32)).tolist() == [[0.0] * 32]


def test_batch_mates_and_chunks_change_no_text(model_file: Path) -> None:
    backend = CausalLM.load(
        model_file, threads=1, dtype="fp32", quantization="int8", kv_memory_bytes=100 << 20, device="cpu"
    )
    prompts = [Tokenizer(backend.card).encode(text) for text in TEXTS[:4]]
    alone = [Driver(backend).run([p], [greedy(6)])[0].output for p in prompts]
    assert [one.output for one in Driver(backend).run(prompts, [greedy(6)] * 4)] == alone
    assert [one.output for one in Driver(backend, chunk=7).run(prompts, [greedy(6)] * 4)] == alone


def test_what_cannot_be_done_is_said(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelError, match="unknown quantization 'int3'"):
        decoder(checkpoint, "int3")
    assert "for CPUs" in int8_refusal("cuda")
    assert int8_refusal("cpu") == ""
