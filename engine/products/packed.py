"""The compiled products: which variant of the loops is used here, and matrices packed for them."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.cpu.build import BuildError, compiled
from engine.products.blocks import BLOCK, Blocks

__all__ = ["Packed", "Products", "open_products"]

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("products.cpp")
_PANEL = 16
_PLAIN, _NAMES = 0, ("plain", "AVX2", "AVX-512 VNNI")
_PANEL_BLOCK_BYTES = {4: 320, 8: 544}  # 16 outputs x 32 inputs, scales included
_WIDE_BITS, _WIDE_BYTES = 13, 2080  # the same for 16 outputs x 64 inputs
_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class _Weights(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_long),
        ("inputs", ctypes.c_long),
        ("bits", ctypes.c_long),
        ("gated", ctypes.c_long),
    ]


class Packed:
    """y = x·Wᵀ + bias, [T, in] to [T, out] (T may be several axes), in the dtype of x. Runs on torch's threads.

    A gated one returns silu(first half of y) times its second half, [T, out / 2], rounded to the dtype of x only then.

    A row's result is the same bits whatever the rows beside it and the number of threads.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        variant: int,
        data: Tensor,
        bias: Tensor | None,
        sizes: tuple[int, int, int],
        gated: bool,
    ) -> None:
        self._held = (data, bias)  # their addresses are in the structure
        outputs, self._inputs, bits = sizes
        self._results = outputs // 2 if gated else outputs
        bias_at = bias.data_ptr() if bias is not None else None
        self._weights = _Weights(data.data_ptr(), bias_at, outputs, self._inputs, bits, gated)
        self._address = ctypes.addressof(self._weights)
        self._variant = variant
        self._functions = {dtype: _function(library, f"product_{suffix}") for dtype, suffix in _SUFFIX.items()}

    def __call__(self, x_TI: Tensor) -> Tensor:
        *leading, inputs = x_TI.shape
        if inputs != self._inputs:
            raise ValueError(f"rows of {inputs} numbers times a matrix of {self._inputs} inputs")
        x_TI = x_TI.contiguous()
        out_TO = torch.empty(*leading, self._results, dtype=x_TI.dtype)
        rows = x_TI.numel() // inputs
        if self._functions[x_TI.dtype](self._address, x_TI.data_ptr(), out_TO.data_ptr(), rows, self._variant):
            raise RuntimeError(f"this library has no {_NAMES[self._variant]} loops")
        return out_TO


class Products:
    """Packs matrices for the best variant that agrees with the plain loops on this processor.

    Those of `gated` products have the gates' outputs first, and as many others; of both a multiple of `GATES`.
    `wide` ones have inputs in whole blocks of `WIDE_BLOCK`.
    """

    GATES = _PANEL
    WIDE_BLOCK = 64

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._library = compiled(_SOURCE, cache_dir)
        self.variant = self._best()

    def levels(
        self, blocks: Blocks, bias_O: Tensor | None = None, *, gated: bool = False, variant: int | None = None
    ) -> Packed:
        """Weights as they are in the blocks; x is rounded to 8 bits for each row and block of 32 inputs."""
        outputs, inputs = blocks.shape
        data = torch.empty(
            -(-outputs // _PANEL) * (inputs // BLOCK) * _PANEL_BLOCK_BYTES[blocks.bits], dtype=torch.uint8
        )
        rows = _in_turn(blocks.rows, gated).contiguous()
        self._pack("pack_levels", rows, outputs, inputs // BLOCK, blocks.bits, data)
        chosen = self.variant if variant is None else variant
        return self._packed(data, bias_O, (outputs, inputs, blocks.bits), chosen, gated)

    def floats(self, weight_OI: Tensor, bias_O: Tensor | None = None, *, gated: bool = False) -> Packed:
        """Weights in their own dtype, float32 or bfloat16; everything is multiplied and summed in float32."""
        outputs, inputs = weight_OI.shape
        weight_OI = _in_turn(weight_OI, gated).contiguous()
        data = torch.empty(-(-outputs // _PANEL) * _PANEL * inputs, dtype=weight_OI.dtype)
        self._pack(f"pack_{_SUFFIX[weight_OI.dtype]}", weight_OI, outputs, inputs, data)
        return self._packed(data, bias_O, (outputs, inputs, weight_OI.dtype.itemsize * 8), self.variant, gated)

    def wide(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, gated: bool = False, variant: int | None = None
    ) -> Packed:
        """Float32 weights as levels of 13 bits, whose unit, a power of 2, is that of a block of 64 inputs; x has 14
        bits for each row and block.

        Raises ValueError for rows that aren't whole blocks, and for weights that aren't finite.
        """
        outputs, inputs = weight_OI.shape
        if inputs % self.WIDE_BLOCK or not weight_OI.isfinite().all():
            raise ValueError(f"rows of {inputs} numbers are not whole blocks of {self.WIDE_BLOCK}, or not finite")
        weight_OI = _in_turn(weight_OI.float(), gated).contiguous()
        data = torch.empty(-(-outputs // _PANEL) * (inputs // self.WIDE_BLOCK) * _WIDE_BYTES, dtype=torch.uint8)
        self._pack("pack_wide", weight_OI, outputs, inputs, data)
        chosen = self.variant if variant is None else variant
        return self._packed(data, bias_O, (outputs, inputs, _WIDE_BITS), chosen, gated)

    def _pack(self, name: str, source: Tensor, *arguments: Any) -> None:
        function = getattr(self._library, name)
        kinds = [ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_long for a in arguments]
        function.argtypes, function.restype = [ctypes.c_void_p, *kinds], None
        function(source.data_ptr(), *(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))

    def _packed(
        self, data: Tensor, bias_O: Tensor | None, sizes: tuple[int, int, int], variant: int, gated: bool
    ) -> Packed:
        bias = None if bias_O is None else _in_turn(bias_O.float(), gated).contiguous()
        return Packed(self._library, variant, data, bias, sizes, gated)

    def variants(self) -> list[int]:
        """Those that were compiled for this processor, the fastest first."""
        known: int = self._library.variants()
        return [v for v in reversed(range(len(_NAMES))) if known >> v & 1]

    def _best(self) -> int:
        """The fastest that computes what the plain loops do: a compiler or a virtual processor may be at fault."""
        for variant in self.variants():
            if variant == _PLAIN or self._agrees(variant):
                return variant
            _log.warning("the %s products disagree with the plain ones here; not used", _NAMES[variant])
        return _PLAIN

    def _agrees(self, variant: int) -> bool:
        chance = torch.Generator().manual_seed(1)
        x = torch.randn(13, 192, generator=chance)
        eight = Blocks.rounded(torch.randn(35, 192, generator=chance))
        four = torch.randint(256, (35, 120), generator=chance, dtype=torch.uint8)
        four.view(35, 6, 20)[..., :4] = torch.randn(35, 6, 2, generator=chance).half().view(torch.uint8)
        pairs = [[self.levels(blocks, variant=v) for v in (_PLAIN, variant)] for blocks in (eight, Blocks(4, four))]
        weight = torch.randn(35, 192, generator=chance)
        pairs.append([self.wide(weight, variant=v) for v in (_PLAIN, variant)])
        for plain, tried in pairs:
            for rows in (1, 2, 3, 4, 5, 6, 8, 13):  # every tile, and both ways to read the weights
                if not torch.allclose(tried(x[:rows]), plain(x[:rows]), rtol=1e-4, atol=1e-2):
                    return False
        return True


def _in_turn(rows: Tensor, gated: bool) -> Tensor:
    """A panel of gates, the panel it lets through, the next of gates, and so on; ValueError for parts of panels."""
    if not gated:
        return rows
    if len(rows) % (2 * _PANEL):
        raise ValueError(f"{len(rows)} outputs are not whole panels of gates and of others")
    return rows.unflatten(0, (2, -1, _PANEL)).transpose(0, 1).flatten(0, 2)


@lru_cache(maxsize=1)
def open_products() -> Products | None:
    """None, and a warning that says why, when they can't be compiled here."""
    try:
        return Products()
    except BuildError as error:
        _log.warning("matrix products by torch alone (slower): %s", error)
        return None


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    pointer = ctypes.c_void_p
    function.argtypes, function.restype = (pointer, pointer, pointer, ctypes.c_long, ctypes.c_int), ctypes.c_int
    return function
