"""Which kernels to use."""

from __future__ import annotations

import logging

import torch

from engine.attention.contract import HeadShape, Kernels
from engine.attention.reference import ReferenceKernels

__all__ = ["choose_kernels"]

_log = logging.getLogger(__name__)


def choose_kernels(
    name: str,
    dtype: torch.dtype,
    shape: HeadShape,
    *,
    block_size: int,
    widths: tuple[int, ...],
    threads: int,
    device: str = "cpu",
) -> Kernels:
    """The kernel set of that name; "auto" takes the fastest that works on the device for a model of these sizes.

    Raises ValueError for an unknown name and RuntimeError when the one asked for by name can't be had.
    """
    if name == "reference":
        return ReferenceKernels(dtype)
    if name not in ("auto", "cpu", "triton"):
        raise ValueError(f"unknown kernels {name!r}: auto, cpu, triton or reference")
    if name == "triton" or (name == "auto" and torch.device(device).type != "cpu"):
        return _triton(dtype, device)
    if torch.device(device).type != "cpu":
        raise RuntimeError(f"the cpu kernels can't be used on {device}")
    from engine.attention.cpu import BuildError, CpuKernels
    from engine.attention.cpu.kernels import supports

    reason = f"a model of {shape}, widths {widths} and blocks of {block_size} isn't covered"
    if supports(shape, block_size, widths):
        try:
            return CpuKernels(dtype, threads)
        except BuildError as error:
            reason = str(error)
    if name == "cpu":
        raise RuntimeError(f"the cpu kernels can't be used: {reason}")
    _log.warning("reference kernels (slower): %s", reason)
    return ReferenceKernels(dtype)


def _triton(dtype: torch.dtype, device: str) -> Kernels:
    if torch.device(device).type != "cuda":
        raise RuntimeError(f"the triton kernels can't be used on {device}: they need a GPU")
    try:
        from engine.attention.triton import TritonKernels
    except ImportError as error:
        raise RuntimeError(f"the triton kernels can't be used: Triton is not installed ({error})") from error
    return TritonKernels(dtype)
