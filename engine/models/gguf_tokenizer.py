"""A tokenizer in the JSON of the Hugging Face `tokenizers` library, made from GGUF metadata."""

from __future__ import annotations

import json
from typing import Any

from engine.models.checkpoint import ModelError, TextAssets, need

__all__ = ["text_assets"]

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTE_LEVEL_ONLY = _BYTE_LEVEL | {"use_regex": False}
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_DIGITS = {"type": "Digits", "individual_digits": True}

# How text is cut before merging, by the name llama.cpp gives it; the patterns are those the models were trained with.
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": _sequence(_DIGITS, _BYTE_LEVEL),
    "starcoder": _sequence(_DIGITS, _BYTE_LEVEL),
    "refact": _sequence(_DIGITS, _BYTE_LEVEL),
    "gpt-2": _BYTE_LEVEL,
    "default": _BYTE_LEVEL,
    "llama-bpe": _sequence(_split(_LLAMA3_SPLIT), _BYTE_LEVEL_ONLY),
    "qwen2": _sequence(_split(_QWEN2_SPLIT), _BYTE_LEVEL_ONLY),
}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word that is a token is taken as it is, without merging
_NFC = {"qwen2"}

# Names under which models end a turn although only one of them is declared as end token.
_END_NAMES = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>"}


def text_assets(metadata: dict[str, Any], what: str) -> TextAssets:
    """Tokenizer, template and special ids. Raises `ModelError` for a tokenizer we can't rebuild exactly."""
    tokens: list[str] = need(metadata, "tokenizer.ggml.tokens", list, what)
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{what}: the file is corrupt: {len(tokens)} tokens but {len(kinds)} token types")
    bos, eos = (_token_id(metadata, f"tokenizer.ggml.{name}_token_id", tokens, what) for name in ("bos", "eos"))
    ends = {eos, _token_id(metadata, "tokenizer.ggml.eot_token_id", tokens, what)} - {None}
    ends |= {i for i, kind in enumerate(kinds) if kind == _CONTROL and tokens[i] in _END_NAMES}
    return TextAssets(
        tokenizer=json.dumps(_tokenizer(metadata, tokens, kinds, what), ensure_ascii=False),
        chat_template=str(metadata.get("tokenizer.chat_template", "")),
        eos_ids=tuple(sorted(i for i in ends if i is not None)),
        bos_id=bos,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
    )


def _token_id(metadata: dict[str, Any], key: str, tokens: list[str], what: str) -> int | None:
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
        raise ModelError(f"{what}: the file is corrupt: {key} is {value!r:.40}")
    return value


def _tokenizer(metadata: dict[str, Any], tokens: list[str], kinds: list[int], what: str) -> dict[str, Any]:
    model, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or cut not in _PRE_TOKENIZERS:
        raise ModelError(f"{what}: the tokenizer {model}/{cut} is not supported; a Hugging Face folder of the model is")
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for i, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut in _NFC else None,
        "pre_tokenizer": _PRE_TOKENIZERS[cut],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut in _WHOLE_WORDS_FIRST,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in need(metadata, "tokenizer.ggml.merges", list, what)],
        },
    }
