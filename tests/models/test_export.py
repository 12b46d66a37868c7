"""An exported model is the same model: weights bit for bit, shape, tokenizer, template and ends."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from engine.models import open_checkpoint
from engine.models.export import _names, main
from engine.models.gguf_format import GGUFFile
from tests.models.test_refusals import write


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf", random=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_folder_holds_the_dequantised_weights(quantised: Path, tmp_path: Path, dtype: str) -> None:
    assert main([str(quantised), "--folder", str(tmp_path / "hf"), "--dtype", dtype]) == 0
    a, b = open_checkpoint(quantised), open_checkpoint(tmp_path / "hf")
    assert (a.config, a.text) == (b.config, b.text)
    for name in _names(a.config):
        kept = a.tensor(name) if dtype == "fp32" else a.tensor(name).bfloat16().float()
        assert torch.equal(kept, b.tensor(name)), name


def test_a_float32_gguf_holds_the_dequantised_weights(quantised: Path, tmp_path: Path) -> None:
    assert main([str(quantised), "--gguf", str(tmp_path / "f32.gguf")]) == 0
    before, after = GGUFFile(quantised), GGUFFile(tmp_path / "f32.gguf")
    assert {info.kind for info in before.tensors.values()} > {gguf.GGMLQuantizationType.Q8_0}
    assert {info.kind for info in after.tensors.values()} == {gguf.GGMLQuantizationType.F32}
    added = {"general.file_type": int(gguf.LlamaFileType.ALL_F32)}
    assert after.metadata == before.metadata | added
    for name, info in before.tensors.items():
        assert (before.dequantised(info) == after.dequantised(after.tensors[name])).all(), name


def test_what_is_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no")
    assert main([str(tmp_path / "x.gguf"), "--gguf", str(tmp_path / "y.gguf")]) == 1
    assert "not a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "y.gguf").exists()
