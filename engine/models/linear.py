"""Linear layers, packed once for the machine they run on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.products import BLOCK, Blocks, Products, open_products

__all__ = ["Linear", "int8_refusal", "pack_gated", "pack_linear", "quantised_linear", "rounded_rows"]

Linear = Callable[[Tensor], Tensor]
"""[T, in] to [T, out], in the dtype of its input."""

_ROWS_HINT = 32  # the batch oneDNN lays the weight out for; measured good from 1 to 512 rows
_MULTIPLES = 32767  # of a row's unit that the scale of one of its blocks may be: they are 15 bits of an instruction


def pack_linear(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Linear:
    """A linear layer of float32 parameters, its weights kept in `dtype`, summed in float32.

    oneDNN is best where the processor multiplies bf16 itself, and for float32 with AVX-512; elsewhere our own products
    (oneDNN would refuse bf16 or emulate it), which multiply integers of 13 and 14 bits in its place where rows are
    whole blocks. All sum a row the same way whatever the number of rows: a sequence's numbers don't depend on who
    shares its batch.
    """
    if (own := _own(weight_OI, bias_O, dtype)) is not None:
        return own
    weight = weight_OI.to(dtype)
    bias = None if bias_O is None else bias_O.to(dtype)
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return lambda x: functional.linear(x, weight, bias)
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        product = _reordered(weight.float(), bias_O)
        return lambda x: product(x.float()).to(dtype)
    return _reordered(weight, bias)


def _own(weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Linear | None:
    """Our own product, where oneDNN isn't better and it can be had."""
    native = torch.cpu._is_avx512_bf16_supported() if dtype == torch.bfloat16 else torch.cpu._is_avx512_supported()
    if native or weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if (products := open_products()) is None:
        return None
    if dtype == torch.bfloat16:
        try:
            return products.wide(weight_OI, bias_O, gated=gated)
        except ValueError:  # as they are, then
            pass
    return products.floats(weight_OI.to(dtype), bias_O, gated=gated)


def pack_gated(weights: Tensor | Blocks, dtype: torch.dtype, silu_mul: Linear) -> Linear:
    """silu(first half) times second half of a product's outputs, in one go where our own products compute it.

    `weights` are float32 [out, in], or blocks, which the input is rounded for. `silu_mul` takes [T, out] elsewhere.
    """
    whole = weights.shape[0] % (2 * Products.GATES) == 0
    if isinstance(weights, Blocks):
        if whole and (products := open_products()) is not None:
            return products.levels(weights, gated=True)
        linear = quantised_linear(weights, None)
    else:
        if whole and (own := _own(weights, None, dtype, gated=True)) is not None:
            return own
        linear = pack_linear(weights, None, dtype)
    return lambda x: silu_mul(linear(x))


def _reordered(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        result: Tensor = product(x, packed, bias, "none", [], "")
        return result

    return linear


def int8_refusal(device: str) -> str:
    """Why products in int8 are of no use here; "" when they are."""
    if torch.device(device).type != "cpu":
        return f"int8 is for CPUs; leave --quantization out on {device}"
    return ""


def quantised_linear(blocks: Blocks, bias_O: Tensor | None) -> Linear:
    """A linear layer of weights in blocks, its input rounded to 8 bits for each row and block, as llama.cpp does it.

    Without a compiler torch multiplies the same rounded numbers in float32: as exact, but slow.
    """
    if (products := open_products()) is not None:
        return products.levels(blocks, bias_O)
    weight_OI = blocks.floats()
    return lambda x: functional.linear(rounded_rows(x), weight_OI, bias_O).to(x.dtype)


def rounded_rows(x_TI: Tensor) -> Tensor:
    """float32: every block of 32 numbers as the nearest of 255 levels, the largest at ±127 or a little less.

    A block's levels are a whole multiple of its row's unit apart, which is that of the row's largest block over 32767.
    """
    blocks_TBb = x_TI.float().unflatten(-1, (-1, BLOCK))
    peak_TB1 = blocks_TBb.abs().amax(-1, keepdim=True)
    peak_T11 = peak_TB1.amax(-2, keepdim=True).clamp_min(1e-30)
    unit_T11 = peak_T11 / (127 * _MULTIPLES)
    scale_TB1 = unit_T11 * (peak_TB1 * (_MULTIPLES / peak_T11)).ceil().clamp(1, _MULTIPLES)
    return ((blocks_TBb * (1 / scale_TB1)).round() * scale_TB1).flatten(-2)
