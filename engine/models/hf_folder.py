"""A Hugging Face model folder as a checkpoint. Weights come from safetensors only: a pickle can run code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.models.checkpoint import DecoderConfig, ModelError, RopeScaling, TextAssets, need
from engine.models.hashing import file_sha256
from engine.models.rounding import rounded
from engine.products import Blocks

__all__ = ["FolderCheckpoint", "hash_files", "read_json", "read_tensor", "tensor_files"]

_MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class FolderCheckpoint:
    """`config.json`, `tokenizer.json` and `*.safetensors` (sharded or not); nothing in the folder is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        raw = read_json(path / "config.json", required=True)
        self._files = tensor_files(path)
        self.config = _config(raw, self._files, str(path))
        self.text = _text(path, raw)

    def tensor(self, name: str) -> torch.Tensor:
        return read_tensor(self.path, self._files, name)

    def blocks(self, name: str) -> Blocks:
        return rounded(self.tensor(name), f"{self.path}: {name}")

    def content_hash(self) -> str:
        named = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        return hash_files({*self._files.values(), *(self.path / name for name in named)})


def hash_files(files: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of those that exist."""
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.exists():
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def read_tensor(path: Path, files: dict[str, Path], name: str) -> torch.Tensor:
    """One tensor of a folder as float32. Raises `ModelError`."""
    file = files.get(name)
    if file is None:
        raise ModelError(f"{path}: the tensor {name} is missing")
    try:
        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(name).float()
    except SafetensorError as error:
        raise ModelError(f"{file}: the file is corrupt: {error}") from error


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.exists():
        if required:
            raise ModelError(f"{path.parent}: {path.name} is missing")
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def tensor_files(path: Path) -> dict[str, Path]:
    """The file of each tensor."""
    files: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as handle:
                files |= dict.fromkeys(handle.keys(), file)
        except SafetensorError as error:
            raise ModelError(f"{file}: the file is corrupt or truncated: {error}") from error
    if not files:
        raise ModelError(f"{path}: no safetensors weights in it (other formats are refused: they can run code)")
    return files


def _config(raw: dict[str, Any], tensors: dict[str, Path], what: str) -> DecoderConfig:
    kind = raw.get("model_type")
    if kind not in _MODEL_TYPES:
        raise ModelError(f"{what}: the model type {kind!r} is not supported ({', '.join(_MODEL_TYPES)} are)")
    if raw.get("hidden_act", "silu") != "silu" or raw.get("mlp_bias"):
        raise ModelError(f"{what}: only SiLU feed-forward layers without bias are supported")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", kind == "mistral"):
        raise ModelError(f"{what}: sliding-window attention is not supported")
    heads, hidden = need(raw, "num_attention_heads", int, what), need(raw, "hidden_size", int, what)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return DecoderConfig(
        architecture=_MODEL_TYPES[kind],
        layers=need(raw, "num_hidden_layers", int, what),
        hidden=hidden,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate=need(raw, "intermediate_size", int, what),
        vocab_size=need(raw, "vocab_size", int, what),
        context_length=need(raw, "max_position_embeddings", int, what),
        rope_base=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied_output=bool(raw.get("tie_word_embeddings", False)) or "lm_head.weight" not in tensors,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in tensors,
        rope_scaling=_rope_scaling(rope, what),
    )


def _rope_scaling(rope: dict[str, Any], what: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{what}: rotary scaling of type {kind!r} is not supported")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def _text(path: Path, raw: dict[str, Any]) -> TextAssets:
    tokenizer_file = path / "tokenizer.json"
    if not tokenizer_file.exists():
        raise ModelError(f"{path}: tokenizer.json is missing")
    settings = read_json(path / "tokenizer_config.json")
    generation = read_json(path / "generation_config.json")
    tokenizer = tokenizer_file.read_text()
    bos_token, eos_token = _content(settings.get("bos_token")), _content(settings.get("eos_token"))
    ids = {t["content"]: t["id"] for t in json.loads(tokenizer).get("added_tokens", [])}
    declared = generation.get("eos_token_id", raw.get("eos_token_id"))
    ends = set(declared if isinstance(declared, list) else [declared]) | {ids.get(eos_token)}
    bos = ids.get(bos_token, raw.get("bos_token_id"))
    return TextAssets(
        tokenizer=tokenizer,
        chat_template=_chat_template(path, settings),
        eos_ids=tuple(sorted(i for i in ends if isinstance(i, int))),
        bos_id=bos if isinstance(bos, int) else None,
        add_bos=bool(settings.get("add_bos_token", _adds_bos(json.loads(tokenizer), bos_token))),
        bos_token=bos_token,
        eos_token=eos_token,
    )


def _adds_bos(layout: dict[str, Any], bos_token: str) -> bool:
    """Whether the tokenizer's own post-processing begins with the BOS token."""
    post = layout.get("post_processor") or {}
    steps = post.get("processors", [post])
    firsts = [step["single"][0] for step in steps if step.get("single")]
    return any(first.get("SpecialToken", {}).get("id") == bos_token for first in firsts)


def _chat_template(path: Path, settings: dict[str, Any]) -> str:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several, by name
        named = {t["name"]: t["template"] for t in template}
        template = named.get("default", "")
    return str(template)


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
