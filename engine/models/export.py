"""`python -m engine.models.export`: the same weights, dequantised, in a form that other engines read.

To compare engines all of them need the same model: a Hugging Face folder (safetensors, tokenizer, configuration) for
those that read no GGUF, or a GGUF file of float32 as the reference of what quantised arithmetic loses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file

from engine.models.checkpoint import Checkpoint, DecoderConfig, ModelError
from engine.models.gguf_format import GGUFFile
from engine.models.loading import open_checkpoint

__all__ = ["write_folder", "write_gguf"]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def write_folder(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    """A Hugging Face folder. The weights are written last, under their name when whole: a folder with them is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in _jsons(checkpoint, dtype).items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False))
    (folder / "tokenizer.json").write_text(checkpoint.text.tokenizer)
    (folder / "chat_template.jinja").write_text(checkpoint.text.chat_template)
    tensors = {name: checkpoint.tensor(name).to(_DTYPES[dtype]).contiguous() for name in _names(checkpoint.config)}
    part = folder / "weights.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.rename(folder / "model.safetensors")


def write_gguf(path: Path, target: Path) -> None:
    """The GGUF file again with every tensor in float32. Raises `ModelError` for what isn't one."""
    source, fields = GGUFFile(path), gguf.GGUFReader(path).fields
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, str(source.metadata["general.architecture"]))
    for field in fields.values():
        if field.name.startswith("GGUF.") or field.name in {"general.architecture", "general.file_type"}:
            continue
        kind = field.types[0]
        writer.add_key_value(
            field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, info in source.tensors.items():
        writer.add_tensor(name, source.dequantised(info))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def _names(config: DecoderConfig) -> Iterator[str]:
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tied_output:
        yield "lm_head.weight"
    for layer in range(config.layers):
        base = f"model.layers.{layer}"
        yield from (f"{base}.{part}.weight" for part in _LAYER)
        if config.qkv_bias:
            yield from (f"{base}.self_attn.{x}_proj.bias" for x in "qkv")
        if config.qk_norm:
            yield from (f"{base}.self_attn.{x}_norm.weight" for x in "qk")


def _jsons(checkpoint: Checkpoint, dtype: str) -> dict[str, dict[str, Any]]:
    """config.json, generation_config.json and tokenizer_config.json."""
    config, text = checkpoint.config, checkpoint.text
    if config.rope_scaling is not None:
        raise ModelError(f"{checkpoint.path}: rotary scaling can't be exported")
    ends = list(text.eos_ids)
    shape = {
        "architectures": [_TYPES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_output,
        "torch_dtype": "bfloat16" if dtype == "bf16" else "float32",
        "bos_token_id": text.bos_id,
        "eos_token_id": ends,
    }
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text.bos_token,
        "eos_token": text.eos_token,
        "add_bos_token": text.add_bos,
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": text.bos_id, "eos_token_id": ends}
    return {"config.json": shape, "generation_config.json": generation, "tokenizer_config.json": tokens}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.models.export", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="GGUF file, or for --folder also a Hugging Face folder")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--folder", type=Path, help="write a Hugging Face folder")
    kind.add_argument("--gguf", type=Path, help="write a GGUF file of float32")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16", help="of the folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        if options.folder:
            write_folder(open_checkpoint(options.model), options.folder, options.dtype)
        else:
            write_gguf(options.model, options.gguf)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
