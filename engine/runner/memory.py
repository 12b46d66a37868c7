"""KV blocks on the device and on the host, and the copies between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.attention import HeadShape, KVStore
from engine.runner.device import CpuDevice, Device

__all__ = ["KVMemory"]


class KVMemory:
    """A block is one contiguous run of bytes in either pool, so every copy here moves whole blocks.

    Copies begin at once and in order; `fence` orders the kernels of the step after all of them.
    """

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        layers: int,
        shape: HeadShape,
        block_size: int,
        dtype: torch.dtype,
        device: Device | None = None,
    ) -> None:
        self.device = device or CpuDevice()
        self.store = KVStore(device_blocks, layers, shape, block_size, dtype, self.device.name)
        self._host = self.device.host((host_blocks, *self.store.data.shape[1:]), dtype)

    def park(self, device: Sequence[int], host: Sequence[int]) -> None:
        """Copy device blocks to host blocks, pairwise."""
        self._copy(self.store.data, device, self._host, host)

    def restore(self, host: Sequence[int], device: Sequence[int]) -> None:
        """Copy host blocks to the first device blocks, pairwise; the device blocks after them are room to grow."""
        self._copy(self._host, host, self.store.data, device[: len(host)])

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy device blocks (source, target) in order."""
        for source, target in pairs:
            self.device.copy(self.store.data[source], self.store.data[target])

    def fence(self) -> None:
        """What is computed from here on sees all copies done."""
        self.device.fence()

    def _copy(self, source: torch.Tensor, sources: Sequence[int], target: torch.Tensor, targets: Sequence[int]) -> None:
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} blocks can't be copied to {len(targets)}")
        for a, b in zip(sources, targets, strict=True):
            self.device.copy(source[a], target[b])
