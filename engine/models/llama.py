"""Llama and its near relatives (SmolLM2, Mistral; with q/k/v biases Qwen2; with q/k norms Qwen3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import HeadShape, Kernels, KVStore, PagedBatch
from engine.models.checkpoint import Checkpoint, DecoderConfig, ModelError
from engine.models.linear import Linear, pack_linear
from engine.models.turned import TurnedCheckpoint

__all__ = ["Llama"]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    feed_forward_norm: Tensor
    gate_up: Linear
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
        if int8:
            checkpoint = TurnedCheckpoint(checkpoint)
        config = checkpoint.config
        self.config = config
        self.shape = HeadShape(config.heads, config.kv_heads, config.head_dim)
        self.dtype = dtype
        self._kernels = kernels
        read = _Reader(checkpoint, device)
        embedding = read("model.embed_tokens.weight", config.vocab_size, config.hidden)
        head = embedding if config.tied_output else read("lm_head.weight", config.vocab_size, config.hidden)
        self._embedding = embedding.to(dtype)
        rounding = kernels if int8 else None
        self._head = pack_linear(head, None, dtype, int8=rounding)
        self._norm = read("model.norm.weight", config.hidden)
        self._layers = [_read_layer(read, config, number, dtype, rounding) for number in range(config.layers)]
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
            delta_TD = layer.output(kernels.attention(qkv_TE, batch, store, number))
            x_TD = kernels.add_rms_norm(residual_TD, delta_TD, layer.feed_forward_norm, eps)
            delta_TD = layer.down(kernels.silu_mul(layer.gate_up(x_TD)))
        if rows_R is None or delta_TD is None:
            return None
        last_RD = kernels.add_rms_norm(residual_TD[rows_R], delta_TD[rows_R], self._norm, eps)
        return self._head(last_RD).float()

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
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._checkpoint.path}: {name} has shape {tuple(tensor.shape)}, not {shape}")
        return tensor.to(self._device)


def _read_layer(read: _Reader, config: DecoderConfig, number: int, dtype: torch.dtype, int8: Kernels | None) -> _Layer:
    prefix = f"model.layers.{number}."
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    qkv = torch.cat([read(f"{prefix}self_attn.{part}.weight", rows, config.hidden) for part, rows in parts])
    bias = (
        torch.cat([read(f"{prefix}self_attn.{part}.bias", rows) for part, rows in parts]) if config.qkv_bias else None
    )
    gate_up = torch.cat(
        [read(f"{prefix}mlp.{part}.weight", config.intermediate, config.hidden) for part in ("gate_proj", "up_proj")]
    )
    down = read(f"{prefix}mlp.down_proj.weight", config.hidden, config.intermediate)
    return _Layer(
        attention_norm=read(f"{prefix}input_layernorm.weight", config.hidden),
        qkv=pack_linear(qkv, bias, dtype, int8=int8),
        q_norm=read(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=read(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=pack_linear(read(f"{prefix}self_attn.o_proj.weight", config.hidden, queries), None, dtype, int8=int8),
        feed_forward_norm=read(f"{prefix}post_attention_layernorm.weight", config.hidden),
        gate_up=pack_linear(gate_up, None, dtype, int8=int8),
        down=pack_linear(down, None, dtype, int8=int8, turn=True),
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
