"""Matrix products with weights laid out once for the machine they run on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention import Kernels
from engine.attention.contract import hadamard

__all__ = ["Linear", "int8_refusal", "pack_linear"]

Linear = Callable[[Tensor], Tensor]
"""[T, in] to [T, out], in the dtype of its input."""

_ROWS_HINT = 32  # the batch oneDNN lays the weight out for; measured good from 1 to 512 rows


def pack_linear(
    weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, *, int8: Kernels | None = None, turn: bool = False
) -> Linear:
    """A linear layer of float32 parameters, computed in `dtype`; with `int8` in bytes, which these kernels round.

    On a CPU the weight is reordered for oneDNN. Beside being faster, its kernels sum a row the same way whatever the
    number of rows, which keeps a sequence's numbers independent of who shares its batch. `turn` is for int8: spread
    what stands out in the input before it is rounded.
    """
    if int8 is not None:
        return _int8(weight_OI, bias_O, int8, turn)
    on_cpu = weight_OI.device.type == "cpu"
    if on_cpu and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _widened(weight_OI.to(dtype), bias_O)
    weight = weight_OI.to(dtype)
    bias = None if bias_O is None else bias_O.to(dtype)
    if on_cpu and torch.backends.mkldnn.is_available():
        return _packed(weight, bias)
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        result: Tensor = product(x, packed, bias, "none", [], "")
        return result

    return linear


def _widened(weight: Tensor, bias: Tensor | None) -> Linear:
    """bfloat16 in and out, computed in float32: what oneDNN can do on a CPU that has no bfloat16 instructions."""
    product = pack_linear(weight.float(), bias, torch.float32)
    return lambda x: product(x.float()).to(torch.bfloat16)


def int8_refusal(device: str) -> str:
    """Why products in int8 are of no use here; "" when they are."""
    if torch.device(device).type != "cpu":
        return f"int8 is for CPUs; leave --quantization out on {device}"
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return "int8 needs a torch that was built with oneDNN; leave --quantization out"
    if not torch.cpu._is_vnni_supported():  # without it oneDNN multiplies bytes slower than floats
        return "int8 needs a processor with AVX-512 VNNI; leave --quantization out"
    return ""


def _int8(weight_OI: Tensor, bias_O: Tensor | None, kernels: Kernels, turn: bool) -> Linear:
    """Weights in int8 with a scale for each output, activations in 8 bits with a scale for each row.

    oneDNN multiplies unsigned by signed bytes (other signs it computes a hundred times slower): the activations' levels
    lie around 128, and what this adds to the result, the same for every row, is the product's bias.
    """
    turned_OI = hadamard(weight_OI.float()) if turn else weight_OI.float()
    scale_O = (turned_OI.abs().amax(1) / 127).clamp_min(1e-12)
    bytes_OI = (turned_OI / scale_O.unsqueeze(1)).round().to(torch.int8)
    middle_O = -128 * scale_O * bytes_OI.sum(1)
    packed = torch.ops.onednn.qlinear_prepack(bytes_OI, None)
    zeros_O = torch.zeros(len(scale_O), dtype=torch.int64)
    product = torch.ops.onednn.qlinear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        levels, scale_T = kernels.quantize_rows(x, turn)
        sums = product(levels, 1.0, 0, packed, scale_O, zeros_O, middle_O, 1.0, 0, torch.float32, "none", [], "")
        return kernels.scale_rows(sums, scale_T, bias_O)

    return linear
