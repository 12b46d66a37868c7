"""Radix prefix index over whole blocks, salted per tenant, with eviction by (tier, last use).

A node is one full block; the path from a salt's root spells the tokens [0, depth * block_size). Invariants:
P1 whoever holds a node's block holds the blocks of all its ancestors, so refs(parent) >= refs(child);
P2 a parent's tier is at least as good as its child's, and it is released no earlier: the order of eviction
   (worst tier first, then least recently released, then deepest) always reaches a child before its parent.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator
from typing import Any

__all__ = ["Node", "PrefixIndex"]


class Node:
    """One cached block. `tier` is the best tier that ever used it (0 is best)."""

    __slots__ = ("block", "children", "key", "parent", "tier")

    def __init__(self, parent: Node | None, key: Any, block: int, tier: int) -> None:
        self.parent, self.key, self.block, self.tier = parent, key, block, tier
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixIndex:
    """Maps token prefixes to blocks. The pool tells it which blocks are referenced (`pin`, `unpin`)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}
        # by tier: unreferenced blocks, oldest release first
        self._lru: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self.evictable = 0
        self.version = 0
        """Grows whenever a match could change: lets callers keep a match."""

    def root(self, salt: str) -> Node:
        return self._roots.setdefault(salt, Node(None, salt, -1, 0))

    def match(self, salt: str, tokens: list[int] | tuple[int, ...], limit: int) -> list[Node]:
        """Longest cached path that covers at most `limit` tokens."""
        node, size, path = self._roots.get(salt), self.block_size, []
        end = size
        while node is not None and end <= limit:
            node = node.children.get(tuple(tokens[end - size : end]))
            if node is not None:
                path.append(node)
            end += size
        return path

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int, tier: int) -> Node:
        """Add a full, computed block below `parent`; it must not be in the index yet."""
        node = parent.children[tokens] = self._nodes[block] = Node(parent, tokens, block, tier)
        self.improve(parent, tier)
        self.version += 1
        return node

    def improve(self, node: Node | None, tier: int) -> None:
        """A user of a better tier touched the path up from `node` (keeps P2)."""
        while node is not None and node.block >= 0 and node.tier > tier:
            if node.block in self._lru[node.tier]:
                del self._lru[node.tier][node.block]
                self._lru[tier][node.block] = None
            node.tier = tier
            node = node.parent

    def touch(self, node: Node | None) -> None:
        """The path up from `node` was used now: it goes to the young end of its queue, parents last (P2)."""
        while node is not None and node.block >= 0:
            if node.block in self._lru[node.tier]:
                self._lru[node.tier].move_to_end(node.block)
            node = node.parent

    def pin(self, block: int) -> None:
        """An unreferenced block becomes live again."""
        del self._lru[self._nodes[block].tier][block]
        self.evictable -= 1

    def unpin(self, block: int) -> bool:
        """The last reference to a block is gone. True: it stays cached; False: it is not indexed."""
        node = self._nodes.get(block)
        if node is None:
            return False
        self._lru[node.tier][block] = None
        self.evictable += 1
        return True

    def evict(self, block: int) -> list[int]:
        """Forget an unreferenced block's content, and with it what is cached below: those blocks are returned."""
        top = self._nodes[block]
        if top.parent is not None:
            del top.parent.children[top.key]
            if top.parent.parent is None and not top.parent.children:
                del self._roots[top.parent.key]
        gone, stack = [], [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            del self._nodes[node.block], self._lru[node.tier][node.block]
            gone.append(node.block)
        self.evictable -= len(gone)
        self.version += 1
        return gone[1:]

    def victims(self) -> Iterator[int]:
        """Unreferenced blocks in the order of eviction."""
        for tier in sorted(self._lru, reverse=True):
            yield from self._lru[tier]

    def holds(self, block: int) -> bool:
        return block in self._nodes

    def check(self, refs: list[int], free: Container[int]) -> None:
        """P1, P2 and the counts."""
        queued = {block for queue in self._lru.values() for block in queue}
        if len(queued) != self.evictable or queued != {b for b in self._nodes if not refs[b]}:
            raise AssertionError("evictable blocks differ from unreferenced indexed blocks")
        for block, node in self._nodes.items():
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node or block in free:
                raise AssertionError(f"index node of block {block} is detached or free")
            if parent.block >= 0 and (refs[parent.block] < refs[block] or parent.tier > node.tier):
                raise AssertionError(f"block {block} outlives its parent {parent.block}")
        order = {block: place for place, block in enumerate(self.victims())}
        for block, place in order.items():
            above = self._nodes[block].parent
            if above is not None and above.block >= 0 and order.get(above.block, place + 1) <= place:
                raise AssertionError(f"block {above.block} would be evicted before its child {block}")
