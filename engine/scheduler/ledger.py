"""What one plan may still spend. Forked from the books at the start of a plan and thrown away with it."""

from __future__ import annotations

from engine.kv.pool import BlockFork, BlockPool, HostFork, HostPool

__all__ = ["Ledger"]


class Ledger:
    """Rows (sequences in the step), tokens (computed in the step), device and host blocks."""

    __slots__ = ("coming", "device", "host", "promised", "rows", "tokens")

    def __init__(self, device: BlockPool, host: HostPool, rows: int, tokens: int) -> None:
        self.rows, self.tokens = rows, tokens
        self.device: BlockFork = device.fork()
        self.host: HostFork = host.fork()
        self.coming = 0
        """Device blocks that swaps of this plan will free once it is committed; they can't be spent in it."""
        self.promised = 0
        """Device blocks that running sequences lack for what they know: taken piece by piece, no one else's."""

    @property
    def free(self) -> int:
        """Device blocks for newcomers."""
        return self.device.available - self.promised

    def take(self, count: int) -> tuple[int, ...]:
        """Device blocks for who was promised them."""
        self.promised -= count
        return self.device.take(count)
