"""KV blocks on the device and on the host, and the copies between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.attention import HeadShape, KVStore

__all__ = ["KVMemory"]


class KVMemory:
    """A block is one contiguous run of bytes in either pool, so every copy here moves whole blocks.

    Copies are ordered with the kernels of the step (one stream), so a block that was copied out may be reused by the
    next step at once.
    """

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        layers: int,
        shape: HeadShape,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.store = KVStore(device_blocks, layers, shape, block_size, dtype)
        self._host = KVStore(host_blocks, layers, shape, block_size, dtype).data

    def park(self, device: Sequence[int], host: Sequence[int]) -> None:
        """Copy device blocks to host blocks, pairwise."""
        _copy(self.store.data, device, self._host, host)

    def restore(self, host: Sequence[int], device: Sequence[int]) -> None:
        """Copy host blocks to device blocks, pairwise."""
        _copy(self._host, host, self.store.data, device)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy device blocks (source, target) in order."""
        for source, target in pairs:
            self.store.data[target].copy_(self.store.data[source])


def _copy(source: torch.Tensor, sources: Sequence[int], target: torch.Tensor, targets: Sequence[int]) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} blocks can't be copied to {len(targets)}")
    for a, b in zip(sources, targets, strict=True):
        target[b].copy_(source[a])
