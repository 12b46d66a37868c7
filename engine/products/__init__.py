"""Matrix products for CPUs with weights packed once: blocks of 4- or 8-bit levels, bfloat16, or float32.

It must not know models, layers or attention: a product is a matrix, and rows to multiply by it.
"""

from engine.products.blocks import BLOCK, Blocks
from engine.products.packed import Packed, Products, open_products

__all__ = ["BLOCK", "Blocks", "Packed", "Products", "open_products"]
