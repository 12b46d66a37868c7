"""Device blocks with reference counts, and the fork on which a plan spends them.

Every block is in exactly one of three states: free, live (referenced by a table), or cached (unreferenced, but its
content is still in the prefix index and may be evicted). `check` proves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from engine.kv.prefix import PrefixIndex

__all__ = ["BlockFork", "BlockPool", "HostFork", "HostPool"]


class BlockPool:
    """Blocks `0 .. size-1` of `block_size` tokens. Only `claim`, `share` and `release` change who holds what."""

    def __init__(self, size: int, block_size: int) -> None:
        self.size, self.block_size = size, block_size
        self.refs = [0] * size
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size - 1, -1, -1))  # taken from the end
        self.index = PrefixIndex(block_size)

    @property
    def available(self) -> int:
        """Blocks that can be claimed now: free, or cached and evictable."""
        return len(self.free) + self.index.evictable

    @property
    def live(self) -> int:
        return self.size - self.available

    def claim(self, blocks: Iterable[int]) -> None:
        """Take unreferenced blocks for new content; a cached one loses its content first."""
        for block in blocks:
            if self.refs[block]:
                raise AssertionError(f"block {block} is live and cannot be claimed")
            if block in self.free:
                del self.free[block]
            else:
                self.free.update(dict.fromkeys(self.index.evict(block)))
            self.refs[block] = 1

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are live or cached (a prefix hit, or a copy-on-write sibling)."""
        for block in blocks:
            if not self.refs[block]:
                self.index.pin(block)
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block of a table; from its end, so that children get evicted before parents."""
        for block in reversed(tuple(blocks)):
            self.refs[block] -= 1
            if self.refs[block] < 0:
                raise AssertionError(f"block {block} released twice")
            if not self.refs[block] and not self.index.unpin(block):
                self.free[block] = None

    def fork(self) -> BlockFork:
        return BlockFork(self)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """The books balance: references equal what the tables hold, and free + live + cached = all."""
        held = [0] * self.size
        for table in tables:
            for block in table:
                held[block] += 1
        if held != self.refs:
            wrong = [b for b in range(self.size) if held[b] != self.refs[b]]
            raise AssertionError(f"references differ from tables at blocks {wrong[:8]}")
        live = sum(1 for refs in self.refs if refs)
        if len(self.free) + live + self.index.evictable != self.size:
            raise AssertionError(f"free {len(self.free)} + live {live} + cached {self.index.evictable} != {self.size}")
        if any(self.refs[block] for block in self.free):
            raise AssertionError("a live block is on the free list")
        self.index.check(self.refs, self.free)


class BlockFork:
    """What a plan has taken on paper. Nothing happens to the pool until the plan is committed.

    Order of taking: free blocks, then cached ones (worst tier, least recently used), then blocks that a sequence
    parked by recompute gave up in this same plan. Blocks that a swap still has to copy out are never counted.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._fresh: Iterator[int] = reversed(pool.free)
        self._cached: Iterator[int] = pool.index.victims()
        self._given: list[int] = []
        self._pinned: set[int] = set()
        self.taken: set[int] = set()
        """Blocks that get new content in this plan: no prefix hit may use them any more."""
        self.available = pool.available

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks; the caller has compared with `available` before."""
        if count > self.available:
            raise AssertionError(f"{count} blocks asked, {self.available} available")
        self.available -= count
        blocks = tuple([self._next() for _ in range(count)])
        self.taken.update(blocks)
        return blocks

    def undo(self, blocks: Iterable[int]) -> None:
        """Give back what `take` returned: its taker does not run in this step after all."""
        blocks = tuple(blocks)
        self.taken.difference_update(blocks)
        self._given.extend(blocks)
        self.available += len(blocks)

    def _next(self) -> int:
        for source in (self._fresh, self._cached):
            for block in source:
                if block not in self._pinned:
                    return block
        while True:
            block = self._given.pop()
            if block not in self._pinned:
                return block

    def unpinned(self, blocks: Iterable[int]) -> int:
        """How many of these blocks a `pin` would take from `available`."""
        refs, pinned, given = self._pool.refs, self._pinned, self._given
        return sum(1 for b in blocks if b not in pinned and (not refs[b] or (given and b in given)))

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep the content of cached blocks: a sequence starts on them in this plan."""
        blocks = tuple(blocks)
        self.available -= self.unpinned(blocks)
        self._pinned.update(b for b in blocks if not self._pool.refs[b] or b in self._given)

    def give(self, blocks: Iterable[int]) -> None:
        """A table parked by recompute: its blocks that nobody else holds can be taken at once."""
        mine = [b for b in blocks if self._pool.refs[b] == 1]
        self._given.extend(mine)
        self.available += len(mine)


class HostPool:
    """Host blocks for parked sequences: free or parked, never shared."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size - 1, -1, -1))

    def claim(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            del self.free[block]

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self.free:
                raise AssertionError(f"host block {block} released twice")
            self.free[block] = None

    def fork(self) -> HostFork:
        return HostFork(self)

    def check(self, parked: Iterable[Iterable[int]]) -> None:
        held = [block for blocks in parked for block in blocks]
        if len(set(held)) != len(held) or len(held) + len(self.free) != self.size or any(b in self.free for b in held):
            raise AssertionError(f"host: parked {len(held)} + free {len(self.free)} != {self.size}, or shared")


class HostFork:
    def __init__(self, pool: HostPool) -> None:
        self._free: Iterator[int] = reversed(pool.free)
        self.available = len(pool.free)

    def take(self, count: int) -> tuple[int, ...]:
        if count > self.available:
            raise AssertionError(f"{count} host blocks asked, {self.available} available")
        self.available -= count
        return tuple(next(self._free) for _ in range(count))
