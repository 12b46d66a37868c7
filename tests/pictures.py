"""Small pictures and small image models of random weights, for every room that needs them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

LABELS = ("cat", "dog", "hen", "fox", "owl")
SIDE, PATCH, HIDDEN, WIDE, LAYERS, HEADS = 32, 8, 32, 64, 2, 4
TOKENS = (SIDE // PATCH) ** 2 + 1


def picture(width: int = 60, height: int = 40, seed: int = 1, mode: str = "RGB") -> Image.Image:
    """Smooth and coloured, other for each seed."""
    bands = len(mode)
    values = ((seed * 97 + i * 53 + b * 151 + i * i * seed) % 256 for i in range(20) for b in range(bands))
    low = Image.frombytes(mode, (5, 4), bytes(values))
    return low.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def vit_folder(path: Path, **changes: Any) -> Path:
    """A ViT as `transformers` saves one, with changes to its config.json."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.cls_token": (1, 1, HIDDEN),
        "vit.embeddings.position_embeddings": (1, TOKENS, HIDDEN),
        "vit.embeddings.patch_embeddings.projection.weight": (HIDDEN, 3, PATCH, PATCH),
        "vit.embeddings.patch_embeddings.projection.bias": (HIDDEN,),
        **_linear("classifier", len(LABELS), HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"vit.encoder.layer.{layer}."
        for part in ("attention.attention.query", "attention.attention.key", "attention.attention.value"):
            shapes |= _linear(prefix + part, HIDDEN, HIDDEN)
        shapes |= _linear(f"{prefix}attention.output.dense", HIDDEN, HIDDEN)
        shapes |= _linear(f"{prefix}intermediate.dense", WIDE, HIDDEN) | _linear(f"{prefix}output.dense", HIDDEN, WIDE)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    norms = ["vit.layernorm"]
    norms += [f"vit.encoder.layer.{i}.layernorm_{where}" for i in range(LAYERS) for where in ("before", "after")]
    for name in norms:
        weights[f"{name}.weight"] = 1 + torch.randn(HIDDEN, generator=generator) * 0.2
        weights[f"{name}.bias"] = torch.randn(HIDDEN, generator=generator) * 0.2
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": WIDE,
        "image_size": SIDE,
        "patch_size": PATCH,
        "layer_norm_eps": 1e-12,
        "id2label": {str(i): label for i, label in enumerate(LABELS)},
        "label2id": {label: i for i, label in enumerate(LABELS)},
    }
    (path / "config.json").write_text(json.dumps(config | changes))
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}, "resample": 2}
    settings |= {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.25, 0.3]}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def _linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
