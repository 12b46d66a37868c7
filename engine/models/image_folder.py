"""A Hugging Face folder with an image classifier as a checkpoint: safetensors weights, preprocessing from its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.models.checkpoint import ModelError, need
from engine.models.hf_folder import hash_files, read_json, read_tensor, tensor_files

__all__ = ["ImageCheckpoint", "Preprocessing"]

ARCHITECTURES = ("ViTForImageClassification", "ResNetForImageClassification")
_PROCESSORS = ("ViTImageProcessor", "ViTFeatureExtractor", "ConvNextImageProcessor", "ConvNextFeatureExtractor")
_SETTINGS = "preprocessor_config.json"
_MEAN = _STD = (0.5, 0.5, 0.5)
_MAX_SIDE = 4096
_WARP_FROM = 384
"""ConvNext's preprocessing (ResNet's too): models of smaller images cut the middle out, others squeeze the whole."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a picture becomes the model's input, as `transformers` does it: resize, cut, scale, normalise.

    `shortest` is what the shorter side is resized to before the middle of `height` x `width` is cut out; 0: the whole
    picture is squeezed into them. `resample` is Pillow's number of a filter.
    """

    height: int
    width: int
    shortest: int
    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


class ImageCheckpoint:
    """`config.json`, `preprocessor_config.json` and `*.safetensors`; nothing in the folder is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = read_json(path / "config.json", required=True)
        named = self.raw.get("architectures")
        self.architecture = named[0] if isinstance(named, list) and named else None
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: the architecture {self.architecture!r} is not supported for images "
                f"({', '.join(ARCHITECTURES)} are)"
            )
        self._files = tensor_files(path)
        self.preprocessing = _preprocessing(read_json(path / _SETTINGS, required=True), path)
        self.labels = _labels(self.raw, path)
        kind = self.raw.get("problem_type") or "single_label_classification"
        if kind not in ("single_label_classification", "multi_label_classification"):
            raise ModelError(f"{path}: the problem type {kind!r} is not supported (classification is)")
        self.many = kind == "multi_label_classification"
        """Classes don't exclude each other."""
        if self.number("num_channels", 3) != 3:
            raise ModelError(f"{path}: only images of three channels (RGB) are supported")

    def number(self, key: str, default: int | None = None) -> int:
        """A positive whole number of the configuration. Raises `ModelError`."""
        if default is not None and self.raw.get(key) is None:
            return default
        value: int = need(self.raw, key, int, str(self.path))
        if value < 1:
            raise ModelError(f"{self.path}: {key} is not usable ({value})")
        return value

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor as float32, of this shape. Raises `ModelError`."""
        tensor = read_tensor(self.path, self._files, name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.path}: {name} has shape {tuple(tensor.shape)}, not {shape}")
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def content_hash(self) -> str:
        return hash_files({*self._files.values(), self.path / "config.json", self.path / _SETTINGS})


def _labels(raw: dict[str, Any], path: Path) -> tuple[str, ...]:
    """The classes' names; `transformers` leaves them out when there are two that were never named."""
    names = raw.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(raw.get("num_labels") or 2))
    if isinstance(names, dict) and names and set(names) == {str(i) for i in range(len(names))}:
        return tuple(str(names[str(i)]) for i in range(len(names)))
    raise ModelError(f"{path}: id2label does not name the classes 0 to n - 1")


def _preprocessing(raw: dict[str, Any], path: Path) -> Preprocessing:
    what = f"{path}/{_SETTINGS}"
    kind = str(raw.get("image_processor_type") or raw.get("feature_extractor_type") or "ViTImageProcessor")
    for ending in ("Fast", "Pil"):
        kind = kind.removesuffix(ending)
    if kind not in _PROCESSORS:
        raise ModelError(f"{what}: the image processor {kind!r} is not supported ({', '.join(_PROCESSORS)} are)")
    if raw.get("do_resize", True) is not True:
        raise ModelError(f"{what}: preprocessing without resizing is not supported")
    next_style = kind.startswith("ConvNext")
    height, width, shortest = _sizes(raw, what, next_style)
    resample = need({"resample": 2} | raw, "resample", int, what)
    if not 0 <= resample <= 5:
        raise ModelError(f"{what}: {resample} is no filter")
    normal = raw.get("do_normalize", True)
    return Preprocessing(
        height=height,
        width=width,
        shortest=shortest,
        resample=resample,
        factor=float(raw.get("rescale_factor", 1 / 255)) if raw.get("do_rescale", True) else 1.0,
        mean=_triple(raw.get("image_mean", _MEAN), "image_mean", what) if normal else (0.0, 0.0, 0.0),
        std=_triple(raw.get("image_std", _STD), "image_std", what) if normal else (1.0, 1.0, 1.0),
    )


def _sizes(raw: dict[str, Any], what: str, next_style: bool) -> tuple[int, int, int]:
    """(height, width, shortest side before the cut or 0)."""
    size = raw.get("size")
    if isinstance(size, int):  # as older releases wrote it
        size = {"shortest_edge": size} if next_style else {"height": size, "width": size}
    size = {k: v for k, v in size.items() if v is not None} if isinstance(size, dict) else {}
    if next_style and (edge := _side(size, "shortest_edge", what)):
        if edge >= _WARP_FROM:
            return edge, edge, 0
        share = raw.get("crop_pct")
        return edge, edge, int(edge / (share if share is not None else 224 / 256))
    if raw.get("do_center_crop"):
        crop = raw.get("crop_size")
        crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop or {}
        height, width = _side(crop, "height", what), _side(crop, "width", what)
        shortest = _side(size, "shortest_edge", what)
        if shortest < max(height, width):
            raise ModelError(f"{what}: images are resized to less than what is cut out of them")
        return height, width, shortest
    return _side(size, "height", what), _side(size, "width", what), 0


def _side(size: dict[str, Any], key: str, what: str) -> int:
    value: int = need(size, key, int, what)
    if not 1 <= value <= _MAX_SIDE:
        raise ModelError(f"{what}: {key} is not usable ({value})")
    return value


def _triple(value: Any, key: str, what: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(isinstance(v, int | float) for v in value):
        raise ModelError(f"{what}: {key} is not three numbers")
    return tuple(float(v) for v in value)
