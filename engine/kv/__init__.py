"""Which block holds which token: block pool, radix prefix index, tables, park and restore bookkeeping.

Pure Python: it must not know tensors, Redis, clocks, or why a sequence deserves a block.
"""
