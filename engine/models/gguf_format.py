"""The GGUF container: header, metadata and tensor directory, with every length checked against the file.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package reads the same (we use it to
dequantise), but makes an array object of each of the 100,000 strings of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.models.checkpoint import ModelError

__all__ = ["GGUFFile", "TensorInfo"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ROW_BYTES = 4096
_MAX_ITEMS = 1 << 26  # of an array; also bounds the directory, so that a corrupt count can't fill memory
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major (outermost first)."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    size_bytes: int


class GGUFFile:
    """An opened, memory-mapped GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file
                raise ModelError(f"{path}: not a GGUF file: it is empty") from error
        self._at = 0
        try:
            self.metadata, self.tensors = self._read()
        except (struct.error, IndexError) as error:
            raise ModelError(f"{path}: the file is truncated") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: the file is corrupt: a name is not text") from error

    def raw(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes, a view of the file, uint8 [all but the last axis of its shape, bytes]."""
        return np.frombuffer(self._map, np.uint8, info.size_bytes, info.offset).reshape(*info.shape[:-1], -1)

    def dequantised(self, info: TensorInfo) -> np.ndarray:
        """The tensor as float32; a view of the file when it is stored so."""
        raw = self.raw(info)
        if info.kind == gguf.GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape)
        try:
            values = gguf.dequantize(_in_long_rows(raw), info.kind)
            return np.ascontiguousarray(values, np.float32).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {info.name} has type {info.kind.name}: not supported") from error

    def _read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, pair_count = self._count("tensors"), self._count("metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        directory = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelError(f"{self.path}: the file is corrupt: alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return metadata, {name: self._placed(name, shape, kind, start + at) for name, shape, kind, at in directory}

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= 4:
            raise ModelError(f"{self.path}: the file is corrupt: tensor {name!r:.60} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {kind}") from error
        if shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {name}: rows of {shape[-1]} don't fit blocks of {block}")
        size = prod(shape) // block * block_bytes
        if offset + size > len(self._map):
            missing = offset + size - len(self._map)
            raise ModelError(f"{self.path}: the file is truncated: {missing} bytes of tensor {name} are missing")
        return TensorInfo(name, shape, quantisation, offset, size)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _count(self, what: str) -> int:
        count: int = self._scalar("Q")
        if count > _MAX_ITEMS:
            raise ModelError(f"{self.path}: the file is corrupt: it claims {count} {what}")
        return count

    def _string(self) -> str:
        size: int = self._scalar("Q")
        if size > len(self._map) - self._at:
            raise ModelError(f"{self.path}: the file is truncated or corrupt: a string of {size} bytes")
        text = self._map[self._at : self._at + size].decode("utf-8")
        self._at += size
        return text

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 2:
            raise ModelError(f"{self.path}: the file is corrupt: metadata of the unknown type {kind}")
        item, count = self._scalar("I"), self._count("array items")
        if item in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[item]}")
            values = layout.unpack_from(self._map, self._at)
            self._at += layout.size
            return list(values)
        if item == _STRING:
            return self._strings(count)
        return [self._value(item, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """A vocabulary and its merges are 100,000 of them: one loop without calls takes a fifth of the time."""
        data, at, end = self._map, self._at, len(self._map)
        length, values = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            (size,) = length(data, at)
            at += 8
            if size > end - at:
                raise ModelError(f"{self.path}: the file is truncated or corrupt: a string of {size} bytes")
            values.append(data[at : at + size].decode("utf-8"))
            at += size
        self._at = at
        return values


def _in_long_rows(raw: np.ndarray) -> np.ndarray:
    """The same bytes in fewer rows. `gguf` takes 16 of them at a time; with a small model's that is too little work to
    pay for the calls of numpy, which were half of its time."""
    rows = raw.reshape(-1, raw.shape[-1])
    while rows.shape[0] % 2 == 0 and rows.shape[1] < _ROW_BYTES:
        rows = rows.reshape(rows.shape[0] // 2, -1)
    return rows
