"""Block pool, forks, prefix index and tables by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.pool import BlockPool, HostPool
from engine.kv.table import Table, blocks_for


def put(pool: BlockPool, tokens: list[int], tier: int = 0, salt: str = "") -> Table:
    """A table that starts on what is cached and computes the rest, as the scheduler does."""
    path = pool.index.match(salt, tokens, len(tokens) - 1)
    fork = pool.fork()
    hit = [node.block for node in path]
    fork.pin(hit)
    fresh = fork.take(blocks_for(len(tokens), pool.block_size) - len(hit))
    pool.share(hit)
    pool.claim(fresh)
    table = Table(salt, tier, [*hit, *fresh], path)
    if path:
        pool.index.improve(path[-1], tier)
    table.index(pool, tokens, len(tokens))
    return table


def test_a_retired_prefix_is_found_again_by_its_salt_alone() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(12))
    put(pool, tokens, salt="a").retire(pool, tokens, 12)
    assert [len(pool.index.match(salt, tokens, 11)) for salt in ("a", "b")] == [2, 0]
    assert len(pool.index.match("a", [*range(8), 99, 99, 99, 99], 12)) == 2
    pool.check([])


def test_eviction_takes_the_worst_tier_then_the_least_recently_used_then_the_deepest() -> None:
    pool = BlockPool(8, 2)
    for tier, start in ((0, 0), (2, 10), (2, 20), (1, 30)):
        tokens = [start, start + 1, start + 2, start + 3]
        put(pool, tokens, tier, str(start)).retire(pool, tokens, 4)
    again = [10, 11, 12, 13, 14]
    assert pool.fork().available == 8
    path = [node.block for node in pool.index.match("10", again, 4)]
    pool.share(path)
    pool.release(path)
    order = list(pool.index.victims())
    starts = [next(s for s in ("0", "10", "20", "30") if b in _blocks(pool, s)) for b in order]
    assert starts == ["20", "20", "10", "10", "30", "30", "0", "0"]
    pool.check([])


def _blocks(pool: BlockPool, salt: str) -> list[int]:
    start = int(salt)
    return [n.block for n in pool.index.match(salt, list(range(start, start + 4)), 4)]


def test_a_fork_changes_nothing_and_gives_each_block_once() -> None:
    pool = BlockPool(6, 2)
    tokens = [1, 2, 3, 4]
    put(pool, tokens).retire(pool, tokens, 4)
    fork = pool.fork()
    hit = [n.block for n in pool.index.match("", tokens, 3)]
    fork.pin(hit)
    assert fork.available == 5
    assert not set(fork.take(5)) & set(hit)
    with pytest.raises(AssertionError, match="available"):
        fork.take(1)
    assert pool.fork().available == 6
    pool.check([])


def test_claiming_a_cached_parent_frees_what_hangs_below_it() -> None:
    pool = BlockPool(4, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    table = put(pool, tokens)
    root = table.blocks[0]
    table.retire(pool, tokens, 6)
    pool.claim([root])
    assert (len(pool.free), pool.index.evictable) == (3, 0)
    pool.check([[root]])


def test_equal_content_computed_twice_is_kept_once() -> None:
    pool = BlockPool(8, 2)
    tokens = [1, 2, 3, 4]
    first, second = Table("", 0, (0, 1)), Table("", 0, (2, 3))
    pool.claim([0, 1, 2, 3])
    for table in (first, second):
        table.index(pool, tokens, 4)
    pool.check([first.blocks, second.blocks])
    first.retire(pool, tokens, 4)
    second.retire(pool, tokens, 4)
    assert (pool.index.evictable, len(pool.free)) == (2, 6)
    pool.check([])


def test_books_that_do_not_balance_are_told() -> None:
    pool = BlockPool(4, 2)
    pool.claim([0])
    with pytest.raises(AssertionError, match="references differ"):
        pool.check([])
    with pytest.raises(AssertionError, match="live"):
        pool.claim([0])
    pool.release([0])
    with pytest.raises(AssertionError, match="twice"):
        pool.release([0])
    host = HostPool(2)
    host.claim([1])
    with pytest.raises(AssertionError):
        host.check([])
    with pytest.raises(AssertionError, match="twice"):
        host.release([0])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(0, 2), st.integers(0, 5)),
        max_size=30,
    )
)
def test_any_history_of_tables_balances_and_evicts_children_first(history: list[tuple[list[int], int, int]]) -> None:
    pool = BlockPool(16, 2)
    held: list[tuple[Table, list[int]]] = []
    for tokens, tier, drop in history:
        while held and (len(held) > drop or pool.available < 7):
            table, old = held.pop(0)
            table.retire(pool, old, len(old))
            pool.check([t.blocks for t, _ in held])
        held.append((put(pool, tokens, tier), tokens))
        pool.check([t.blocks for t, _ in held])
