"""The block table of one sequence, and how its full blocks get into the prefix index."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.pool import BlockPool
from engine.kv.prefix import Node

__all__ = ["Table", "blocks_for"]


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class Table:
    """Device blocks of one sequence, in token order.

    The first `indexed` blocks are nodes of the prefix index, the last of them `node`. Where another sequence has put
    equal content there first, this table's chain stops (`diverged`): its own copy stays private until it is retired.
    """

    __slots__ = ("blocks", "diverged", "indexed", "node", "salt", "tier")

    def __init__(self, salt: str, tier: int, blocks: Sequence[int] = (), path: Sequence[Node] = ()) -> None:
        self.salt, self.tier = salt, tier
        self.blocks = list(blocks)
        self.indexed = len(path)
        self.node: Node | None = path[-1] if path else None
        self.diverged = False

    def shared(self, refs: Sequence[int]) -> int:
        """How many of its blocks others hold too: the first ones, as who holds a block holds all before it (P1)."""
        blocks = self.blocks
        if not blocks or refs[blocks[0]] < 2:  # the usual case
            return 0
        return next((count for count, block in enumerate(blocks) if refs[block] < 2), len(blocks))

    def index(self, pool: BlockPool, tokens: Sequence[int], computed: int) -> None:
        """Publish the blocks that are full and computed, so that others may start on them."""
        size = pool.block_size
        while not self.diverged and (self.indexed + 1) * size <= computed:
            at = self.indexed * size
            key = tuple(tokens[at : at + size])
            parent = self.node or pool.index.root(self.salt)
            if key in parent.children:
                self.diverged = True
                return
            self.node = pool.index.insert(parent, key, self.blocks[self.indexed], self.tier)
            self.indexed += 1

    def retire(self, pool: BlockPool, tokens: Sequence[int], computed: int) -> None:
        """Let go of all blocks. What the index lacks of them stays cached there; duplicates become free."""
        size, node, at = pool.block_size, self.node, self.indexed
        while (at + 1) * size <= computed:
            key = tuple(tokens[at * size : (at + 1) * size])
            parent = node or pool.index.root(self.salt)
            node = parent.children.get(key)
            if node is None:
                if pool.refs[self.blocks[at]] != 1 or pool.index.holds(self.blocks[at]):
                    break
                node = pool.index.insert(parent, key, self.blocks[at], self.tier)
            else:
                pool.index.improve(node, self.tier)
            at += 1
        pool.release(self.blocks)
        pool.index.touch(node)
        self.blocks, self.node, self.indexed = [], None, 0
