"""Llama and its near relatives (SmolLM2, Mistral; with q/k/v biases Qwen2; with q/k norms Qwen3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import HeadShape, Kernels, KVStore, PagedBatch
from engine.models.checkpoint import Checkpoint, DecoderConfig, ModelError
from engine.models.linear import Linear, pack_gated, pack_linear, quantised_linear
from engine.products import Blocks

__all__ = ["Llama"]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    feed_forward_norm: Tensor
    gated: Linear
    down: Linear


class Llama:
    """Packed tokens in, logits of chosen rows out. Weights are read from the checkpoint once, layer by layer."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        dtype: torch.dtype,
        context_length: int,
        *,
        int8: bool = False,
        device: str = "cpu",
    ) -> None:
        config = checkpoint.config
        self.config = config
        self.shape = HeadShape(config.heads, config.kv_heads, config.head_dim)
        self.dtype = dtype
        self._kernels = kernels
        read = _Reader(checkpoint, device)
        self._embedding = read("model.embed_tokens.weight", config.vocab_size, config.hidden).to(dtype)
        make = _LayerMaker(read, dtype, int8)
        head = "model.embed_tokens.weight" if config.tied_output else "lm_head.weight"
        self._head = make([(head, config.vocab_size)], config.hidden)
        self._norm = read("model.norm.weight", config.hidden)
        self._layers = [_read_layer(read, make, config, number, kernels.silu_mul) for number in range(config.layers)]
        self._rotary_PD = rotary_table(config, context_length).to(device)

    def forward(self, tokens_T: Tensor, batch: PagedBatch, store: KVStore, rows_R: Tensor | None) -> Tensor | None:
        """Float32 logits [R, vocabulary] of the packed rows `rows_R`; None when no row is asked for."""
        kernels, eps = self._kernels, self.config.norm_eps
        residual_TD = self._embedding[tokens_T].float()
        delta_TD: Tensor | None = None
        for number, layer in enumerate(self._layers):
            x_TD = kernels.add_rms_norm(residual_TD, delta_TD, layer.attention_norm, eps)
            qkv_TE = layer.qkv(x_TD)
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(qkv_TE, layer.q_norm, layer.k_norm)
            kernels.rotate_and_store(qkv_TE, self._rotary_PD, batch, store, number)
            is_last = number == len(self._layers) - 1
            if is_last and rows_R is None:  # all that later tokens want of these is stored
                return None
            attended_TE = kernels.attention(qkv_TE, batch, store, number)
            if is_last:
                attended_TE, residual_TD = attended_TE[rows_R], residual_TD[rows_R]
            delta_TD = layer.output(attended_TE)
            x_TD = kernels.add_rms_norm(residual_TD, delta_TD, layer.feed_forward_norm, eps)
            delta_TD = layer.down(layer.gated(x_TD))
        return self._head(kernels.add_rms_norm(residual_TD, delta_TD, self._norm, eps)).float()

    def _norm_heads(self, qkv_TE: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Qwen3 norms each query and key head by itself, before rotation."""
        heads_THd = qkv_TE.view(qkv_TE.shape[0], -1, self.shape.head_dim)
        for first, last, weight in (
            (0, self.shape.heads, q_norm),
            (self.shape.heads, self.shape.heads + self.shape.kv_heads, k_norm),
        ):
            part = heads_THd[:, first:last].float()
            scale = torch.rsqrt(part.square().mean(-1, keepdim=True) + self.config.norm_eps)
            heads_THd[:, first:last] = (part * scale * weight).to(qkv_TE.dtype)


class _Reader:
    """Tensors by name, with the shape the configuration calls for, on the device."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self._checkpoint = checkpoint
        self._device = device

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        self._check(name, tuple(tensor.shape), shape)
        return tensor.to(self._device)

    def blocks(self, name: str, *shape: int) -> Blocks:
        blocks = self._checkpoint.blocks(name)
        self._check(name, blocks.shape, shape)
        return blocks

    def _check(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise ModelError(f"{self._checkpoint.path}: {name} has shape {found}, not {wanted}")


class _LayerMaker:
    """One linear layer of the weights of all `parts` (name, outputs), stacked: what shares an input is one product."""

    def __init__(self, read: _Reader, dtype: torch.dtype, int8: bool) -> None:
        self._read, self._dtype, self._int8 = read, dtype, int8

    def __call__(self, parts: Sequence[tuple[str, int]], inputs: int, bias: Tensor | None = None) -> Linear:
        weights = self._weights(parts, inputs)
        if isinstance(weights, Blocks):
            return quantised_linear(weights, bias)
        return pack_linear(weights, bias, self._dtype)

    def gated(self, parts: Sequence[tuple[str, int]], inputs: int, silu_mul: Linear) -> Linear:
        """silu(first part) times second part; `silu_mul` computes that of [T, outputs of both] where it must."""
        return pack_gated(self._weights(parts, inputs), self._dtype, silu_mul)

    def _weights(self, parts: Sequence[tuple[str, int]], inputs: int) -> Tensor | Blocks:
        if self._int8:
            return Blocks.stacked([self._read.blocks(name, outputs, inputs) for name, outputs in parts])
        return torch.cat([self._read(name, outputs, inputs) for name, outputs in parts])


def _read_layer(read: _Reader, make: _LayerMaker, config: DecoderConfig, number: int, silu_mul: Linear) -> _Layer:
    prefix = f"model.layers.{number}."
    queries, keys, hidden, wide = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
        config.hidden,
        config.intermediate,
    )
    qkv = [
        (f"{prefix}self_attn.{part}", rows) for part, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    ]
    bias = torch.cat([read(f"{part}.bias", rows) for part, rows in qkv]) if config.qkv_bias else None
    return _Layer(
        attention_norm=read(f"{prefix}input_layernorm.weight", hidden),
        qkv=make([(f"{part}.weight", rows) for part, rows in qkv], hidden, bias),
        q_norm=read(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=read(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=make([(f"{prefix}self_attn.o_proj.weight", hidden)], queries),
        feed_forward_norm=read(f"{prefix}post_attention_layernorm.weight", hidden),
        gated=make.gated([(f"{prefix}mlp.{part}_proj.weight", wide) for part in ("gate", "up")], hidden, silu_mul),
        down=make([(f"{prefix}mlp.down_proj.weight", hidden)], wide),
    )


def rotary_table(config: DecoderConfig, positions: int) -> Tensor:
    """float32 [positions, head_dim]: cosines of all frequencies, then sines (RoFormer, arXiv:2104.09864)."""
    frequencies = config.rope_base ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:  # Llama 3.1: long wavelengths stretched, short ones kept, a linear passage between
        wavelengths = 2 * math.pi / frequencies
        span = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = ((scaling.original_context / wavelengths - scaling.low_freq_factor) / span).clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
