"""BERT, RoBERTa and kin (MiniLM, BGE, E5): packed texts in, one vector each out. Devlin et al., arXiv:1810.04805."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.checkpoint import EncoderConfig, ModelError
from engine.models.encoder_folder import EncoderCheckpoint
from engine.models.linear import Linear, pack_linear

__all__ = ["Bert"]


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    attention_norm: _Norm
    up: Linear
    down: Linear
    feed_forward_norm: _Norm


class Bert:
    """Rows of all texts are packed without padding; texts of one length that lie side by side share their attention.

    Residuals, norms and pooling are float32 whatever `dtype` the products are computed in.
    """

    def __init__(self, checkpoint: EncoderCheckpoint, dtype: torch.dtype) -> None:
        config = self.config = checkpoint.config
        self.dtype = dtype
        read = _Reader(checkpoint)
        self._words = read("embeddings.word_embeddings.weight", config.vocab_size, config.hidden)
        types = checkpoint.tensor("embeddings.token_type_embeddings.weight")
        # There is one text, so every row is of the first type: that is a constant of its position.
        places = config.first_position + config.positions
        table = read("embeddings.position_embeddings.weight", places, config.hidden)
        self._places = table[config.first_position :] + types[0]
        self._norm = read.norm("embeddings.LayerNorm", config.hidden)
        self._layers = [_read_layer(read, config, number, dtype) for number in range(config.layers)]

    def forward(self, tokens_T: Tensor, lengths: Sequence[int]) -> Tensor:
        """Float32 vectors [texts, hidden]. `lengths` are the texts' tokens, in the order in which they are packed."""
        places_T = torch.cat([torch.arange(length) for length in lengths])
        x_TD = self._normed(self._words[tokens_T] + self._places[places_T], self._norm)
        for layer in self._layers:
            attended_TD = self._attention(layer.qkv(x_TD.to(self.dtype)), lengths)
            x_TD = self._normed(x_TD + layer.output(attended_TD), layer.attention_norm)
            wide_TF = functional.gelu(layer.up(x_TD.to(self.dtype)))
            x_TD = self._normed(x_TD + layer.down(wide_TF), layer.feed_forward_norm)
        return self._pooled(x_TD, lengths)

    def _attention(self, qkv_TE: Tensor, lengths: Sequence[int]) -> Tensor:
        heads, hidden = self.config.heads, self.config.hidden
        attended_TD = torch.empty(qkv_TE.shape[0], hidden, dtype=qkv_TE.dtype)
        for rows, texts, length in _runs(lengths):
            parts = qkv_TE[rows].view(texts, length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])  # [texts, heads, length, d]
            attended_TD[rows] = mixed.transpose(1, 2).reshape(texts * length, hidden)
        return attended_TD

    def _pooled(self, x_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        parts = []
        for rows, texts, length in _runs(lengths):
            x_BLD = x_TD[rows].view(texts, length, -1)
            parts.append(x_BLD.mean(1) if self.config.pooling == "mean" else x_BLD[:, 0])
        vectors_BD = torch.cat(parts)
        return functional.normalize(vectors_BD) if self.config.normalize else vectors_BD

    def _normed(self, x_TD: Tensor, norm: _Norm) -> Tensor:
        return functional.layer_norm(x_TD, (self.config.hidden,), norm.weight, norm.bias, self.config.norm_eps)


def _runs(lengths: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
    """(rows, texts, length) of neighbouring texts of one length."""
    start = 0
    for length, group in groupby(lengths):
        texts = sum(1 for _ in group)
        yield slice(start, start + texts * length), texts, length
        start += texts * length


class _Reader:
    """Tensors by name, with the shape the configuration calls for."""

    def __init__(self, checkpoint: EncoderCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._checkpoint.path}: {name} has shape {tuple(tensor.shape)}, not {shape}")
        return tensor

    def norm(self, name: str, size: int) -> _Norm:
        return _Norm(self(f"{name}.weight", size), self(f"{name}.bias", size))


def _read_layer(read: _Reader, config: EncoderConfig, number: int, dtype: torch.dtype) -> _Layer:
    prefix, hidden, wide = f"encoder.layer.{number}.", config.hidden, config.intermediate

    def linear(name: str, out: int, into: int) -> Linear:
        return pack_linear(read(f"{prefix}{name}.weight", out, into), read(f"{prefix}{name}.bias", out), dtype)

    parts = [f"{prefix}attention.self.{part}" for part in ("query", "key", "value")]
    weights = torch.cat([read(f"{part}.weight", hidden, hidden) for part in parts])
    biases = torch.cat([read(f"{part}.bias", hidden) for part in parts])
    return _Layer(
        qkv=pack_linear(weights, biases, dtype),
        output=linear("attention.output.dense", hidden, hidden),
        attention_norm=read.norm(f"{prefix}attention.output.LayerNorm", hidden),
        up=linear("intermediate.dense", wide, hidden),
        down=linear("output.dense", hidden, wide),
        feed_forward_norm=read.norm(f"{prefix}output.LayerNorm", hidden),
    )
