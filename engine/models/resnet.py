"""Residual networks: images in, a number for each class out. He et al., arXiv:1512.03385; stride as in version 1.5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.checkpoint import ModelError
from engine.models.image_folder import ImageCheckpoint

__all__ = ["ResNet"]

_EPS = 1e-5  # of batch normalisation: torch's, which `transformers` does not change
_NARROWING = 4  # of a bottleneck's inner width
_CELL = 32
"""Side of the square of pixels that counts as a token: the stride of the usual four stages."""


@dataclass(frozen=True, slots=True)
class _Conv:
    """A convolution with its normalisation folded into it."""

    weight: Tensor
    bias: Tensor
    stride: int

    def __call__(self, x: Tensor) -> Tensor:
        padding = self.weight.shape[-1] // 2
        return functional.conv2d(x, self.weight, self.bias, stride=self.stride, padding=padding)


@dataclass(frozen=True, slots=True)
class _Block:
    steps: tuple[_Conv, ...]
    shortcut: _Conv | None

    def __call__(self, x: Tensor) -> Tensor:
        y = x
        for step in self.steps[:-1]:
            y = functional.relu(step(y))
        return functional.relu(self.steps[-1](y) + (x if self.shortcut is None else self.shortcut(x)))


class ResNet:
    """A stem, stages of residual blocks, the mean over all places, a classifier."""

    def __init__(self, checkpoint: ImageCheckpoint, dtype: torch.dtype) -> None:
        raw, path = checkpoint.raw, checkpoint.path
        self.dtype, self._checkpoint = dtype, checkpoint
        if (act := raw.get("hidden_act", "relu")) != "relu":
            raise ModelError(f"{path}: the activation {act!r} is not supported (relu is)")
        if (kind := raw.get("layer_type", "bottleneck")) not in ("basic", "bottleneck"):
            raise ModelError(f"{path}: layers of type {kind!r} are not supported (basic and bottleneck are)")
        self._bottleneck, self._early = kind == "bottleneck", bool(raw.get("downsample_in_bottleneck"))
        widths, depths = raw.get("hidden_sizes"), raw.get("depths")
        if not isinstance(widths, list) or not isinstance(depths, list) or len(widths) != len(depths) or not widths:
            raise ModelError(f"{path}: hidden_sizes and depths do not describe stages")
        stem = checkpoint.number("embedding_size")
        self._stem = self._conv("resnet.embedder.embedder", stem, 3, 7, 2)
        self._blocks: list[_Block] = []
        into = stem
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for number in range(depth):
                first = 2 if stage or raw.get("downsample_in_first_stage") else 1
                self._blocks.append(self._block(stage, number, width, into, 1 if number else first))
                into = width
        classes = len(checkpoint.labels)
        self._classifier = checkpoint.tensor("classifier.1.weight", classes, into)
        self._classifier_bias = checkpoint.tensor("classifier.1.bias", classes)
        size = checkpoint.preprocessing
        self.tokens = -(-size.height // _CELL) * -(-size.width // _CELL)
        """What one image costs."""

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Float32 logits [images, classes] of normalised images."""
        x = functional.relu(self._stem(pixels_BCHW.to(self.dtype)))
        x = functional.max_pool2d(x, 3, stride=2, padding=1)
        for block in self._blocks:
            x = block(x)
        return functional.linear(x.float().mean((2, 3)), self._classifier, self._classifier_bias)

    def _block(self, stage: int, number: int, width: int, into: int, stride: int) -> _Block:
        prefix = f"resnet.encoder.stages.{stage}.layers.{number}."
        if self._bottleneck:
            inner = width // _NARROWING
            shapes = [(inner, into, 1, stride if self._early else 1), (inner, inner, 3, 1 if self._early else stride)]
            shapes.append((width, inner, 1, 1))
        else:
            shapes = [(width, into, 3, stride), (width, width, 3, 1)]
        steps = tuple(self._conv(f"{prefix}layer.{i}", *shape) for i, shape in enumerate(shapes))
        plain = into == width and stride == 1
        return _Block(steps, None if plain else self._conv(f"{prefix}shortcut", width, into, 1, stride))

    def _conv(self, name: str, out: int, into: int, side: int, stride: int) -> _Conv:
        tensor, norm = self._checkpoint.tensor, f"{name}.normalization"
        scale = tensor(f"{norm}.weight", out) / (tensor(f"{norm}.running_var", out) + _EPS).sqrt()
        bias = tensor(f"{norm}.bias", out) - tensor(f"{norm}.running_mean", out) * scale
        weight = tensor(f"{name}.convolution.weight", out, into, side, side) * scale.view(-1, 1, 1, 1)
        return _Conv(weight.to(self.dtype), bias.to(self.dtype), stride)
