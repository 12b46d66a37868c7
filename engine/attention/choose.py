"""Which kernels to use."""

from __future__ import annotations

import torch

from engine.attention.contract import Kernels
from engine.attention.reference import ReferenceKernels

__all__ = ["choose_kernels"]


def choose_kernels(name: str, dtype: torch.dtype) -> Kernels:
    """The kernel set of that name; "auto" takes the fastest that works here. Raises ValueError for an unknown one."""
    if name in ("auto", "reference"):
        return ReferenceKernels(dtype)
    raise ValueError(f"unknown kernels {name!r}: auto or reference")
