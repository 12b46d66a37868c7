"""A sentence-transformers folder (or a plain BERT one) as a checkpoint: safetensors weights, pooling from its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from engine.models.checkpoint import EncoderConfig, ModelError, TextAssets, need
from engine.models.hf_folder import hash_files, read_json, read_tensor, tensor_files

__all__ = ["EncoderCheckpoint"]

_MODEL_TYPES = ("bert", "roberta", "xlm-roberta")
_ROOTS = ("", "bert.", "roberta.", "0.auto_model.")
"""What may stand before a tensor's name: the bare encoder, one with a head, one saved with its pooling."""
_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "sentence_bert_config.json"),
    "1_Pooling/config.json",
)


class EncoderCheckpoint:
    """`config.json`, `tokenizer.json`, `*.safetensors`, and sentence-transformers' files where there are any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        raw = read_json(path / "config.json", required=True)
        self._files = tensor_files(path)
        self._root = _root(self._files, path)
        self.config = _config(raw, path)
        self.text = _text(path)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as float32, by its name in the bare encoder. Raises `ModelError`."""
        return read_tensor(self.path, self._files, self._root + name)

    def content_hash(self) -> str:
        return hash_files({*self._files.values(), *(self.path / name for name in _FILES)})


def _root(tensors: dict[str, Path], path: Path) -> str:
    for root in _ROOTS:
        if f"{root}embeddings.word_embeddings.weight" in tensors:
            return root
    raise ModelError(f"{path}: the tensor embeddings.word_embeddings.weight is missing")


def _config(raw: dict[str, Any], path: Path) -> EncoderConfig:
    what, kind = str(path), raw.get("model_type")
    if kind not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise ModelError(f"{what}: the model type {kind!r} is not supported for embeddings ({known} are)")
    if raw.get("hidden_act", "gelu") != "gelu":
        raise ModelError(f"{what}: the activation {raw['hidden_act']!r} is not supported (gelu is)")
    if raw.get("position_embedding_type", "absolute") != "absolute" or raw.get("is_decoder"):
        raise ModelError(f"{what}: only encoders with absolute positions are supported")
    first = 0 if kind == "bert" else need(raw, "pad_token_id", int, what) + 1
    positions = need(raw, "max_position_embeddings", int, what) - first
    sentence = read_json(path / "sentence_bert_config.json")
    _check_case(sentence, path)
    pooling, normalize = _pooling(path)
    hidden, heads = need(raw, "hidden_size", int, what), need(raw, "num_attention_heads", int, what)
    if heads < 1 or hidden % heads:
        raise ModelError(f"{what}: {hidden} values can't be split over {heads} attention heads")
    return EncoderConfig(
        layers=need(raw, "num_hidden_layers", int, what),
        hidden=hidden,
        heads=heads,
        intermediate=need(raw, "intermediate_size", int, what),
        vocab_size=need(raw, "vocab_size", int, what),
        positions=positions,
        first_position=first,
        context_length=min(positions, sentence.get("max_seq_length") or positions),
        norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        pooling=pooling,
        normalize=normalize,
    )


def _check_case(sentence: dict[str, Any], path: Path) -> None:
    """Lowering the case is the tokenizer's business; a folder that wants it done before would be computed wrongly."""
    normalizer = read_json(path / "tokenizer.json", required=True).get("normalizer") or {}
    if sentence.get("do_lower_case") and not normalizer.get("lowercase"):
        raise ModelError(f"{path}: text in lower case is wanted (do_lower_case) but its tokenizer does not lower it")


def _pooling(path: Path) -> tuple[str, bool]:
    """(pooling, normalised) as `modules.json` says; without one, the mean as it is (sentence-transformers' default)."""
    file = path / "modules.json"
    if not file.exists():
        return "mean", False
    try:
        modules = json.loads(file.read_text())
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        folders = [path / str(module["path"]) for module in modules]
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{file}: not a list of modules") from error
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{path}: the modules {', '.join(kinds)} are not supported (Transformer, Pooling, Normalize are)"
        )
    settings = read_json(folders[1] / "config.json", required=True)
    chosen = [name for name, value in settings.items() if name.startswith("pooling_mode") and value]
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(chosen) != 1 or chosen[0] not in names:
        raise ModelError(f"{path}: the pooling {', '.join(chosen) or 'none'} is not supported (mean and cls are)")
    return names[chosen[0]], "Normalize" in kinds


def _text(path: Path) -> TextAssets:
    """The tokenizer; what its post-processing puts before and after a text are its BOS and EOS here."""
    tokenizer = (path / "tokenizer.json").read_text()
    post = json.loads(tokenizer).get("post_processor") or {}
    first, last = _around(post, path)
    return TextAssets(
        tokenizer=tokenizer,
        chat_template="",
        eos_ids=(last[1],),
        bos_id=first[1],
        add_bos=True,
        bos_token=first[0],
        eos_token=last[0],
        add_eos=True,
    )


def _around(post: dict[str, Any], path: Path) -> tuple[tuple[str, int], tuple[str, int]]:
    """The tokens before and after a text, as (text, id)."""
    try:
        if post["type"] in ("BertProcessing", "RobertaProcessing"):
            (sep, sep_id), (cls, cls_id) = post["sep"], post["cls"]
            return (cls, int(cls_id)), (sep, int(sep_id))
        first, middle, last = post["single"]
        names = first["SpecialToken"]["id"], last["SpecialToken"]["id"]
        ids = [post["special_tokens"][name]["ids"] for name in names]
        if "Sequence" not in middle or any(len(each) != 1 for each in ids):
            raise ValueError
        return (names[0], int(ids[0][0])), (names[1], int(ids[1][0]))
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: tokenizer.json does not put one token before and one after a text") from error
