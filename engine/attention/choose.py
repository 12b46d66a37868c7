"""Which kernels to use."""

from __future__ import annotations

import logging

import torch

from engine.attention.contract import HeadShape, Kernels
from engine.attention.reference import ReferenceKernels

__all__ = ["choose_kernels"]

_log = logging.getLogger(__name__)


def choose_kernels(
    name: str, dtype: torch.dtype, shape: HeadShape, *, block_size: int, widths: tuple[int, ...], threads: int
) -> Kernels:
    """The kernel set of that name; "auto" takes the fastest that works here for a model of these sizes.

    Raises ValueError for an unknown name and RuntimeError when the one asked for by name can't be had.
    """
    if name == "reference":
        return ReferenceKernels(dtype)
    if name not in ("auto", "cpu"):
        raise ValueError(f"unknown kernels {name!r}: auto, cpu or reference")
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
