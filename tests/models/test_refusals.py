"""Files that can't be used are refused with the reason; nothing in a model is ever executed."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models import ModelError, open_checkpoint
from engine.models.__main__ import main

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(0x21, 0x7F)), "Ġ", "ab"]


def write(path: Path, **changes: object) -> Path:
    """A tiny but complete GGUF model."""
    values = {"architecture": "llama", "pre": "smollm", "model": "gpt2"} | changes
    writer = gguf.GGUFWriter(str(path), str(values["architecture"]))
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(str(values["model"]))
    writer.add_tokenizer_pre(str(values["pre"]))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *([1] * (len(TOKENS) - 3))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    if values.get("experts"):
        writer.add_expert_count(8)
    shapes = {"token_embd": (len(TOKENS), 32), "output_norm": (32,)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32)}
    shapes |= {"blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32)}
    shapes |= {"blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32)}
    for name, shape in shapes.items():
        if name != values.get("without"):
            weights = np.full(shape, 0.5, np.float32)
            if values.get("random"):
                weights = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
            if values.get("random") and len(shape) == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(f"{name}.weight", gguf.quantize(weights, kind), raw_dtype=kind)
            else:
                writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path).tensor("model.layers.0.self_attn.q_proj.weight")
    return str(caught.value)


def test_the_whole_file_is_accepted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    assert checkpoint.config.heads == 2
    assert checkpoint.text.eos_ids == (0, 2)
    assert checkpoint.tensor("model.layers.0.self_attn.k_proj.weight").shape == (16, 32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"pre": "tekken"}, "tokenizer gpt2/tekken is not supported"),
        ({"model": "llama"}, "tokenizer llama/smollm is not supported"),
        ({"experts": True}, "mixtures of experts"),
        ({"without": "blk.0.attn_q"}, "blk.0.attn_q.weight is missing"),
    ],
)
def test_what_is_not_computed_rightly_is_named(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    assert reason in refusal(write(tmp_path / "m.gguf", **changes))


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 24, 100, 1000, -1, -5000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(path)


def test_not_a_model_at_all(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    assert "not a GGUF file" in refusal(path)
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    path.write_bytes(b"GGUF" + struct.pack("<I", 9) + bytes(64))
    assert "version 9" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64))
    assert "corrupt" in refusal(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


@settings(derandomize=True, max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_to_the_directory_is_a_model_error_or_harmless(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 3000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    except ModelError:
        pass


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "no safetensors weights" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "corrupt or truncated" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[")
    assert "not JSON" in refusal(tmp_path)


def test_the_command_line_says_why_and_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["pull", "nothing", "--data-dir", str(tmp_path)]) == 1
    assert "no model 'nothing'" in capsys.readouterr().err
