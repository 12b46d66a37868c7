"""The Triton kernels: against the reference under the interpreter, and compiled for two GPU generations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention import HeadShape, choose_kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_under_the_interpreter_they_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:django", "--noconftest", "-x", "tests/attention/interpreted.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("element", "shape"), [("fp32", HeadShape(9, 3, 64)), ("bf16", HeadShape(32, 8, 128))])
def test_they_compile_ahead_of_time(capability: int, element: str, shape: HeadShape) -> None:
    pytest.importorskip("triton")
    from engine.attention.triton import compile_ahead

    for decode in (False, True):
        kernels = compile_ahead(capability, element, shape, 16, decode=decode)
        assert set(kernels) == {"rotate_and_store_kernel", "attention_kernel"}
        for kernel in kernels.values():
            assert f".target sm_{capability}" in kernel.asm["ptx"]
            assert kernel.asm["cubin"][:4] == b"\x7fELF"
            assert kernel.metadata.shared <= {80: 163, 90: 227}[capability] * 1024


def test_nothing_imports_triton_until_it_is_chosen() -> None:
    source = "import sys, engine.backends.causal_lm; assert 'engine.attention.triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True)


def test_without_a_gpu_they_are_refused_with_the_reason() -> None:
    sizes = {"block_size": 16, "widths": (64,), "threads": 1}
    with pytest.raises(RuntimeError, match="need a GPU"):
        choose_kernels("triton", torch.float32, HeadShape(2, 1, 32), **sizes)
    with pytest.raises(RuntimeError, match="cpu kernels can't be used on cuda"):
        choose_kernels("cpu", torch.float32, HeadShape(2, 1, 32), **sizes, device="cuda")
