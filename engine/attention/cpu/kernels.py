"""The compiled operations behind the contract."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.contract import HeadShape, KVStore, PagedBatch
from engine.attention.cpu.build import compiled

__all__ = ["CpuKernels", "supports"]

_SOURCE = Path(__file__).with_name("kernels.cpp")
_LANES = 16
_MAX_GROUP, _MAX_HEAD = 24, 256  # TILE and MAX_HEAD of the source
_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16"}

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_SIGNATURES = {
    "add_rms_norm": (_pointer, _pointer, _pointer, _pointer, _long, _long, ctypes.c_float, _int),
    "silu_mul": (_pointer, _pointer, _long, _long, _int),
    "rotate_and_store": (_pointer, _pointer, _pointer, _pointer, _pointer, _pointer, _long, _int),
    "attention": (_pointer, _pointer, _pointer, _pointer, _pointer, _long, _long, _pointer, _pointer, _int),
}


def supports(shape: HeadShape, block_size: int, widths: tuple[int, ...]) -> bool:
    """Whether the compiled operations cover a model of these sizes."""
    return (
        block_size % _LANES == 0
        and shape.head_dim % (2 * _LANES) == 0
        and shape.head_dim <= _MAX_HEAD
        and shape.heads // shape.kv_heads <= _MAX_GROUP
        and all(width % _LANES == 0 for width in widths)
    )


class _Layout(ctypes.Structure):
    _fields_ = [(name, _long) for name in ("heads", "kv_heads", "dim", "block_size", "block_stride", "layer_offset")]


class CpuKernels:
    """Every tensor whose address is passed is held by the caller or returned, so none is freed under the call."""

    name = "cpu"
    _add_rms_norm: Any
    _silu_mul: Any
    _rotate_and_store: Any
    _attention: Any

    def __init__(self, dtype: torch.dtype, threads: int, cache_dir: Path | None = None) -> None:
        library = compiled(_SOURCE, cache_dir)
        self._dtype = dtype
        self._threads = threads
        self._layouts: dict[int, list[_Layout]] = {}
        for name in _SIGNATURES:
            setattr(self, f"_{name}", _function(library, name, _SUFFIX[dtype]))

    def add_rms_norm(self, residual_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        rows, width = residual_TD.shape
        out_TD = torch.empty(rows, width, dtype=self._dtype)
        delta = delta_TD.data_ptr() if delta_TD is not None else None
        self._add_rms_norm(
            residual_TD.data_ptr(), delta, weight_D.data_ptr(), out_TD.data_ptr(), rows, width, eps, self._threads
        )
        return out_TD

    def rotate_and_store(
        self, qkv_TE: Tensor, rotary_PD: Tensor, batch: PagedBatch, store: KVStore, layer: int
    ) -> None:
        self._rotate_and_store(
            qkv_TE.data_ptr(),
            rotary_PD.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            store.data.data_ptr(),
            ctypes.addressof(self._layout(store, layer)),
            qkv_TE.shape[0],
            self._threads,
        )

    def attention(self, qkv_TE: Tensor, batch: PagedBatch, store: KVStore, layer: int) -> Tensor:
        out_TD = torch.empty(qkv_TE.shape[0], store.shape.heads * store.shape.head_dim, dtype=self._dtype)
        rows, width = batch.tables.shape
        self._attention(
            qkv_TE.data_ptr(),
            out_TD.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.contexts.data_ptr(),
            batch.tables.data_ptr(),
            rows,
            width,
            store.data.data_ptr(),
            ctypes.addressof(self._layout(store, layer)),
            self._threads,
        )
        return out_TD

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        rows, width = gate_up_TF.shape
        out_TF = torch.empty(rows, width // 2, dtype=self._dtype)
        self._silu_mul(gate_up_TF.data_ptr(), out_TF.data_ptr(), rows, width // 2, self._threads)
        return out_TF

    def read(self, store: KVStore, blocks_N: Tensor) -> Tensor:
        data = store.data[blocks_N]
        keys = data[:, :, 0].reshape(*data.shape[:2], data.shape[3], data.shape[5], data.shape[4]).transpose(-1, -2)
        return torch.stack([keys, data[:, :, 1]], dim=2).movedim(4, 1).flatten(0, 1)

    def _layout(self, store: KVStore, layer: int) -> _Layout:
        """The layout of one layer, made once for each store."""
        layouts = self._layouts.get(id(store))
        if layouts is None:
            shape, data = store.shape, store.data
            sizes = (shape.heads, shape.kv_heads, shape.head_dim, store.block_size, data.stride(0))
            layouts = [_Layout(*sizes, number * data.stride(1)) for number in range(data.shape[1])]
            self._layouts = {id(store): layouts}
        return layouts[layer]


def _function(library: ctypes.CDLL, name: str, suffix: str) -> Any:
    function = getattr(library, f"{name}_{suffix}")
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function
