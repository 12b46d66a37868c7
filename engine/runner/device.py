"""All that differs between a CPU and a GPU outside the kernels: where tensors lie and when copies are done.

Copies of KV blocks are asked for in any order between two fences; `fence` makes every kernel after it wait for every
copy before it. So a block that was copied out may be written again after the fence, and one that was copied in may be
read: no block returns to use while a copy still reads it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CpuDevice", "CudaDevice", "Device", "open_device"]


class Device(Protocol):
    """Where the model runs."""

    name: str

    def host(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that this device copies from and to fastest."""
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """A small host tensor, on the device. Ordered with the kernels after it; the host doesn't wait."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy one block; after all kernels issued before."""
        ...

    def fence(self) -> None:
        """Kernels issued after this wait for the copies issued before it. The host doesn't wait."""
        ...

    def drain(self) -> None:
        """The host waits for all copies: parked bytes may now be read."""
        ...


class CpuDevice:
    """The twin: a copy is done when it returns."""

    name = "cpu"

    def host(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def fence(self) -> None:
        pass

    def drain(self) -> None:
        pass


class CudaDevice:
    """Copies run on a stream of their own, from and to pinned memory, beside the host's work for the step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._copies = torch.cuda.Stream(device=name)
        self._copying = False

    def host(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.name, non_blocking=True)

    def copy(self, source: Tensor, target: Tensor) -> None:
        if not self._copying:  # earlier kernels first: they write what is copied out and read what is overwritten
            self._copies.wait_stream(torch.cuda.current_stream(self.name))
            self._copying = True
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def fence(self) -> None:
        if self._copying:
            torch.cuda.current_stream(self.name).wait_stream(self._copies)
            self._copying = False

    def drain(self) -> None:
        self._copies.synchronize()


def open_device(name: str) -> Device:
    """ "cpu", "cuda", "cuda:1", or "auto": a GPU when torch sees one. Raises ValueError with the reason."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    if name.split(":")[0] != "cuda":
        raise ValueError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ValueError(f"device {name}: torch sees no GPU here")
    return CudaDevice(name)
