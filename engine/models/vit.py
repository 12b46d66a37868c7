"""The Vision Transformer: images in, a number for each class out. Dosovitskiy et al., arXiv:2010.11929."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.checkpoint import ModelError
from engine.models.image_folder import ImageCheckpoint
from engine.models.linear import Linear, pack_linear

__all__ = ["ViT"]


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: _Norm
    qkv: Linear
    output: Linear
    before_feed_forward: _Norm
    up: Linear
    down: Linear


class ViT:
    """An encoder over an image's patches and one more row, whose result says what the image shows.

    Residuals, norms, the patches' projection and the classifier are float32 whatever `dtype` the other products are
    computed in.
    """

    def __init__(self, checkpoint: ImageCheckpoint, dtype: torch.dtype) -> None:
        read = _Reader(checkpoint, dtype)
        self.dtype, self._heads, self._hidden = dtype, read.heads, read.hidden
        self._eps = float(checkpoint.raw.get("layer_norm_eps", 1e-12))
        side, patch, hidden = checkpoint.number("image_size"), checkpoint.number("patch_size"), read.hidden
        size = checkpoint.preprocessing
        if side % patch or (size.height, size.width) != (side, side):
            raise ModelError(f"{checkpoint.path}: images of {size.height} x {size.width} do not fit {side} x {side}")
        self.tokens = (side // patch) ** 2 + 1
        """Rows of one image: what it costs."""
        self._patch = patch
        tensor = checkpoint.tensor
        name = "vit.embeddings.patch_embeddings.projection"
        self._projection = tensor(f"{name}.weight", hidden, 3, patch, patch)
        self._projection_bias = tensor(f"{name}.bias", hidden)
        self._first_1D = tensor("vit.embeddings.cls_token", 1, 1, hidden)[0]
        self._places_ND = tensor("vit.embeddings.position_embeddings", 1, self.tokens, hidden)[0]
        layers = checkpoint.number("num_hidden_layers")
        self._layers = [read.layer(f"vit.encoder.layer.{number}.") for number in range(layers)]
        self._norm = read.norm("vit.layernorm")
        classes = len(checkpoint.labels)
        self._classifier = tensor("classifier.weight", classes, hidden)
        self._classifier_bias = tensor("classifier.bias", classes)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Float32 logits [images, classes] of normalised images."""
        batch = pixels_BCHW.shape[0]
        patches = functional.conv2d(pixels_BCHW, self._projection, self._projection_bias, stride=self._patch)
        patches_BND = patches.flatten(2).transpose(1, 2)
        first_B1D = self._first_1D.expand(batch, 1, self._hidden)
        x_TD = (torch.cat([first_B1D, patches_BND], 1) + self._places_ND).view(-1, self._hidden)
        for layer in self._layers:
            qkv_TE = layer.qkv(self._normed(x_TD, layer.before_attention).to(self.dtype))
            x_TD = x_TD + layer.output(self._attention(qkv_TE, batch))
            wide_TF = functional.gelu(layer.up(self._normed(x_TD, layer.before_feed_forward).to(self.dtype)))
            x_TD = x_TD + layer.down(wide_TF)
        result_BD = self._normed(x_TD.view(batch, self.tokens, self._hidden)[:, 0], self._norm)
        return functional.linear(result_BD, self._classifier, self._classifier_bias)

    def _attention(self, qkv_TE: Tensor, batch: int) -> Tensor:
        parts = qkv_TE.view(batch, self.tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mixed_BHND = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return mixed_BHND.transpose(1, 2).reshape(batch * self.tokens, self._hidden)

    def _normed(self, x: Tensor, norm: _Norm) -> Tensor:
        return functional.layer_norm(x, (self._hidden,), norm.weight, norm.bias, self._eps)


class _Reader:
    """A layer's tensors, in the shapes that the configuration calls for."""

    def __init__(self, checkpoint: ImageCheckpoint, dtype: torch.dtype) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self.hidden, self.heads = checkpoint.number("hidden_size"), checkpoint.number("num_attention_heads")
        self.wide = checkpoint.number("intermediate_size")
        self._biased = bool(checkpoint.raw.get("qkv_bias", True))
        if self.hidden % self.heads:
            raise ModelError(f"{checkpoint.path}: {self.hidden} values can't be split over {self.heads} heads")
        if (act := checkpoint.raw.get("hidden_act", "gelu")) != "gelu":
            raise ModelError(f"{checkpoint.path}: the activation {act!r} is not supported (gelu is)")

    def norm(self, name: str) -> _Norm:
        tensor = self._checkpoint.tensor
        return _Norm(tensor(f"{name}.weight", self.hidden), tensor(f"{name}.bias", self.hidden))

    def linear(self, name: str, out: int, into: int) -> Linear:
        tensor = self._checkpoint.tensor
        return pack_linear(tensor(f"{name}.weight", out, into), tensor(f"{name}.bias", out), self._dtype)

    def layer(self, prefix: str) -> _Layer:
        hidden, wide, tensor = self.hidden, self.wide, self._checkpoint.tensor
        parts = [f"{prefix}attention.attention.{part}" for part in ("query", "key", "value")]
        weights = torch.cat([tensor(f"{part}.weight", hidden, hidden) for part in parts])
        biases = torch.cat([tensor(f"{part}.bias", hidden) for part in parts]) if self._biased else None
        return _Layer(
            before_attention=self.norm(f"{prefix}layernorm_before"),
            qkv=pack_linear(weights, biases, self._dtype),
            output=self.linear(f"{prefix}attention.output.dense", hidden, hidden),
            before_feed_forward=self.norm(f"{prefix}layernorm_after"),
            up=self.linear(f"{prefix}intermediate.dense", wide, hidden),
            down=self.linear(f"{prefix}output.dense", hidden, wide),
        )
