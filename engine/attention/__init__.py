"""Attention over paged KV for packed tokens, and the small operations beside it: one contract, several kernels.

It must not know models, weights, sequences or scheduling: a batch is offsets, positions and block tables.
"""

from engine.attention.choose import choose_kernels
from engine.attention.contract import HeadShape, Kernels, KVStore, PagedBatch

__all__ = ["HeadShape", "KVStore", "Kernels", "PagedBatch", "choose_kernels"]
