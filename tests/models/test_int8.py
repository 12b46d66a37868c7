"""int8: the operations against their specification, the turned model against the plain one, the loss against fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import HeadShape, choose_kernels
from engine.attention.contract import hadamard
from engine.attention.cpu import CpuKernels
from engine.attention.reference import ReferenceKernels
from engine.backends.causal_lm import CausalLM
from engine.models import Checkpoint, ModelError, open_checkpoint
from engine.models.architectures import Decoder, build_decoder
from engine.models.linear import int8_refusal, pack_linear
from engine.models.turned import TurnedCheckpoint
from engine.text import Tokenizer
from tests.models.test_agreement import packed_logits
from tests.runner.driver import Driver, greedy

needs_int8 = pytest.mark.skipif(bool(int8_refusal("cpu")), reason=int8_refusal("cpu"))
TEXTS = [
    "The harbour master wrote down every ship that came in before noon, and by the end of the week he had filled",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return ordered[middle]\n",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. The reaction takes place in the",
    "Q: A train leaves at 14:35 and needs 2 hours and 50 minutes. When does it arrive?\nA: It arrives at",
    "Der alte Leuchtturm stand seit zweihundert Jahren auf dem Felsen, und niemand wusste mehr, wer ihn",
    '{"order": 4711, "items": [{"name": "screw M4", "count": 200}, {"name": "nut M4", "count": 200}], "paid":',
]
KL_BOUND = 0.015
"""Nats, mean over all positions of TEXTS; 0.0113 was measured with bf16 between the layers."""


@pytest.fixture(scope="module")
def checkpoint(model_file: Path) -> Checkpoint:
    return open_checkpoint(model_file)


def decoder(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, quantization: str = "none") -> Decoder:
    config = checkpoint.config
    shape, widths = HeadShape(config.heads, config.kv_heads, config.head_dim), (config.hidden, config.intermediate)
    kernels = choose_kernels("cpu", dtype, shape, block_size=16, widths=widths, threads=1)
    return build_decoder(checkpoint, kernels, dtype, 512, quantization=quantization)


def logits(model: Decoder, ids: list[list[int]]) -> torch.Tensor:
    return torch.cat(packed_logits(model, ids)).float()


@pytest.fixture(scope="module")
def ids(checkpoint: Checkpoint) -> list[list[int]]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.text.tokenizer)
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, ids: list[list[int]]) -> torch.Tensor:
    return logits(decoder(checkpoint), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turn", [False, True])
def test_rounding_is_as_specified(dtype: torch.dtype, turn: bool) -> None:
    torch.manual_seed(3)
    ours, wanted = CpuKernels(dtype, 2), ReferenceKernels(dtype)
    x = (torch.randn(40, 576) * torch.logspace(-2, 3, 40).unsqueeze(1)).to(dtype)
    x[5] = 0
    (levels, scale), (want_levels, want_scale) = ours.quantize_rows(x, turn), wanted.quantize_rows(x, turn)
    torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)
    assert (levels.int() - want_levels.int()).abs().max() <= 1  # where a number lies between two levels
    assert (levels != want_levels).float().mean() < 1e-3
    sums, bias = torch.randn(40, 100), torch.randn(100)
    for term in (None, bias):
        torch.testing.assert_close(ours.scale_rows(sums, scale, term), wanted.scale_rows(sums, scale, term))


@pytest.mark.parametrize("width", [16, 40, 576, 1536])
def test_the_turn_is_its_own_inverse(width: int) -> None:
    x = torch.randn(3, width, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x).norm(dim=1), x.norm(dim=1))


@needs_int8
def test_a_layer_of_bytes_is_close_to_one_of_floats_and_alone_as_in_company() -> None:
    torch.manual_seed(4)
    weight, bias, x = torch.randn(96, 192), torch.randn(96), torch.randn(33, 192)
    x[:, 7] *= 50  # one lane that stands out
    wanted = x @ weight.T + bias
    for turn, bound in ((True, 0.02), (False, 0.08)):
        layer = pack_linear(weight, bias, torch.float32, int8=ReferenceKernels(torch.float32), turn=turn)
        result = layer(x)
        assert (result - wanted).norm() / wanted.norm() < bound
        assert all(torch.equal(layer(x[r : r + 1])[0], result[r]) for r in range(len(x)))


def test_turned_is_the_same_model(checkpoint: Checkpoint, ids: list[list[int]], expected: torch.Tensor) -> None:
    assert (
        logits(decoder(TurnedCheckpoint(checkpoint)), ids[:2]) - expected[: sum(map(len, ids[:2]))]
    ).abs().max() < 5e-3


@needs_int8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_against_fp32(
    checkpoint: Checkpoint, ids: list[list[int]], expected: torch.Tensor, dtype: torch.dtype
) -> None:
    wanted = expected.log_softmax(-1)
    ours = logits(decoder(checkpoint, dtype, "int8"), ids).log_softmax(-1)
    loss = (wanted.exp() * (wanted - ours)).sum(-1)
    print(f"KL int8 {dtype}: mean {loss.mean():.5f}, p99 {loss.quantile(0.99):.4f}, largest {loss.max():.4f}")
    assert loss.mean() < KL_BOUND
    assert (ours.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9


@needs_int8
def test_batch_mates_and_chunks_change_no_text(model_file: Path) -> None:
    backend = CausalLM.load(
        model_file, threads=1, dtype="fp32", quantization="int8", kv_memory_bytes=100 << 20, device="cpu"
    )
    prompts = [Tokenizer(backend.card).encode(text) for text in TEXTS[:4]]
    alone = [Driver(backend).run([p], [greedy(6)])[0].output for p in prompts]
    assert [one.output for one in Driver(backend).run(prompts, [greedy(6)] * 4)] == alone
    assert [one.output for one in Driver(backend, chunk=7).run(prompts, [greedy(6)] * 4)] == alone


def test_what_cannot_be_done_is_said(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="unknown quantization 'int3'"):
        decoder(checkpoint, quantization="int3")
    assert "for CPUs" in int8_refusal("cuda")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ModelError, match="AVX-512 VNNI"):
        decoder(checkpoint, quantization="int8")
