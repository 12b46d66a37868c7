"""A GGUF file as a checkpoint: its names, its permuted rotary rows and its metadata in our terms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.checkpoint import DecoderConfig, ModelError, need
from engine.models.gguf_format import GGUFFile, TensorInfo
from engine.models.gguf_tokenizer import text_assets
from engine.models.hashing import file_sha256
from engine.models.rounding import as_stored, rounded
from engine.products import Blocks

__all__ = ["GGUFCheckpoint"]

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_INTERLEAVED = {"llama"}  # llama.cpp stores q and k of these for interleaved rotary pairs

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)\Z")


class GGUFCheckpoint:
    """Weights are dequantised one tensor at a time, when asked for; the file stays memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        self.name = str(metadata.get("general.name") or path.stem)
        self.config = _config(metadata, set(self._file.tensors), str(path))
        self.text = text_assets(metadata, str(path))

    def tensor(self, name: str) -> torch.Tensor:
        return self._in_our_order(name, self._file.dequantised(self._info(name)))

    def blocks(self, name: str) -> Blocks:
        info = self._info(name)
        stored = as_stored(info.kind, self._file.raw(info))
        if stored is None:
            return rounded(self.tensor(name), f"{self.path}: {name}")
        return Blocks(stored.bits, self._in_our_order(name, stored.rows.numpy()))

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(_gguf_name(name))
        if info is None:
            raise ModelError(f"{self.path}: the tensor {_gguf_name(name)} is missing")
        return info

    def _in_our_order(self, name: str, rows: np.ndarray) -> torch.Tensor:
        if self.config.architecture in _INTERLEAVED:
            if ".self_attn.q_proj." in name:
                rows = _split_halves(rows, self.config.heads)
            elif ".self_attn.k_proj." in name:
                rows = _split_halves(rows, self.config.kv_heads)
        return torch.from_numpy(rows if rows.flags.writeable else rows.copy())

    def content_hash(self) -> str:
        return file_sha256(self.path)


def _gguf_name(name: str) -> str:
    layer = _LAYER_NAME.match(name)
    if layer:
        number, part, kind = layer.groups()
        return f"blk.{number}.{_LAYER[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}"


def _split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (r0, r1), (r2, r3) … of interleaved rotary pairs become all first members, then all second ones."""
    paired = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _config(metadata: dict[str, Any], tensors: set[str], what: str) -> DecoderConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{what}: the architecture {architecture!r} is not supported ({known} are)")
    _refuse_unsupported(metadata, architecture, tensors, what)

    def number(key: str, kind: type | tuple[type, ...] = int) -> Any:
        return need(metadata, f"{architecture}.{key}", kind, what)

    heads, hidden = number("attention.head_count"), number("embedding_length")
    tokens = need(metadata, "tokenizer.ggml.tokens", list, what)
    return DecoderConfig(
        architecture=_ARCHITECTURES[architecture],
        layers=number("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=metadata.get(f"{architecture}.attention.head_count_kv", heads),
        head_dim=metadata.get(f"{architecture}.attention.key_length", hidden // max(1, heads)),
        intermediate=number("feed_forward_length"),
        vocab_size=len(tokens),
        context_length=number("context_length"),
        rope_base=metadata.get(f"{architecture}.rope.freq_base", 10000.0),
        norm_eps=number("attention.layer_norm_rms_epsilon", float),
        tied_output="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def _refuse_unsupported(metadata: dict[str, Any], architecture: str, tensors: set[str], what: str) -> None:
    """Better no answer than a wrong one: what we don't compute, we name."""
    if metadata.get(f"{architecture}.expert_count", 0):
        raise ModelError(f"{what}: mixtures of experts are not supported")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ModelError(f"{what}: rotary scaling ({scaling}) is not supported in GGUF files")
    if "blk.0.attn_output.bias" in tensors:
        raise ModelError(f"{what}: a bias on the attention output is not supported")
