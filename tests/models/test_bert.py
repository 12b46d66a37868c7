"""Vectors against `transformers` on the same weights; folders that would be computed wrongly are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models import ModelError
from engine.models.bert import Bert
from engine.models.loading import open_encoder

TEXTS = [
    "This framework generates embeddings for each input sentence.",
    "Grüße aus Köln, 世界 \U0001f600 – naïve café",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "def f(x):\n    return x ** 2  # 3.14159e-10",
    "A kitten rests on a rug.",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
]
Write = Callable[..., Path]


def embed(path: Path, ids: list[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    """Vectors in the order of `ids`, from one packed pass."""
    model = Bert(open_encoder(path), dtype)
    with torch.inference_mode():
        return model.forward(torch.tensor([t for text in ids for t in text]), [len(text) for text in ids])


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A small BERT of random weights as a sentence-transformers folder, with changes."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.processors import BertProcessing
    from transformers import BertConfig, BertModel

    def make(pooling: str = "mean_tokens", modules: tuple[str, ...] = (), **changes: Any) -> Path:
        torch.manual_seed(7)
        shape: dict[str, Any] = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = BertConfig(**shape, intermediate_size=80, max_position_embeddings=40)
        BertModel(config).eval().save_pretrained(tmp_path, safe_serialization=True)
        raw = json.loads((tmp_path / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(raw))
        tokenizer = Tokenizer(WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
        tokenizer.post_processor = BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        named = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in modules]
        if named:
            (tmp_path / "modules.json").write_text(json.dumps(named))
        (tmp_path / "Pooling").mkdir(exist_ok=True)
        (tmp_path / "Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
        return tmp_path

    return make


@pytest.mark.peer
@pytest.mark.parametrize("packed", [True, False])
def test_the_real_minilm_in_fp32(embedding_model: Path, packed: bool) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedding_model)
    peer = AutoModel.from_pretrained(embedding_model).eval()
    ids: list[list[int]] = [tokenizer(text).input_ids for text in TEXTS]
    with torch.inference_mode():
        means = [peer(torch.tensor([each])).last_hidden_state.mean(1) for each in ids]
    wanted = torch.nn.functional.normalize(torch.cat(means))
    found = embed(embedding_model, ids) if packed else torch.cat([embed(embedding_model, [each]) for each in ids])
    assert (found - wanted).abs().max() < 1e-5
    assert torch.allclose(found.norm(dim=1), torch.ones(len(TEXTS)))
    assert (embed(embedding_model, ids, torch.bfloat16) * wanted).sum(1).min() > 0.999, "cosine with bf16 products"


@pytest.mark.peer
@pytest.mark.parametrize(
    ("pooling", "modules"),
    [
        ("mean_tokens", ()),
        ("mean_tokens", ("Transformer", "Pooling")),
        ("cls_token", ("Transformer", "Pooling", "Normalize")),
    ],
)
def test_pooling_is_as_the_folder_says(write: Write, pooling: str, modules: tuple[str, ...]) -> None:
    from transformers import BertModel

    path = write(pooling, modules)
    ids = [[1, 5, 6, 2], [1, *range(10, 30), 2], [1, 2], [1, 7, 8, 2], [1, *[98] * 38, 2]]
    peer = BertModel.from_pretrained(path).eval()
    with torch.inference_mode():
        rows = [peer(torch.tensor([each])).last_hidden_state[0] for each in ids]
    wanted = torch.stack([row.mean(0) if pooling == "mean_tokens" else row[0] for row in rows])
    if "Normalize" in modules:
        wanted = torch.nn.functional.normalize(wanted)
    assert (embed(path, ids) - wanted).abs().max() < 1e-5


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_roberta_counts_its_positions_from_after_the_padding(write: Write, kind: str) -> None:
    from transformers import AutoConfig, AutoModel

    path = write()
    torch.manual_seed(11)
    shape: dict[str, Any] = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        kind, **shape, intermediate_size=80, max_position_embeddings=34, type_vocab_size=1, pad_token_id=1
    )
    peer = AutoModel.from_config(config).eval()
    peer.save_pretrained(path, safe_serialization=True)
    ids = [[0, 5, 6, 2], [0, *range(40, 70), 2]]
    assert open_encoder(path).config.context_length == 32 == len(ids[1])
    with torch.inference_mode():
        wanted = torch.cat([peer(torch.tensor([each])).last_hidden_state.mean(1) for each in ids])
    assert (embed(path, ids) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "deberta"}, "'deberta' is not supported for embeddings"),
        ({"hidden_act": "relu"}, "'relu' is not supported"),
        ({"position_embedding_type": "relative_key"}, "absolute positions"),
        ({"num_attention_heads": 5}, "can't be split over 5"),
        ({"hidden_size": 64}, "has shape (99, 48), not (99, 64)"),
        ({"num_hidden_layers": 4}, "encoder.layer.3.attention.self.query.weight is missing"),
        ({"modules": ("Transformer", "Pooling", "Dense")}, "Dense are not supported"),
        ({"modules": ("Transformer", "Pooling"), "pooling": "max_tokens"}, "pooling_mode_max_tokens is not supported"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(write: Write, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        Bert(open_encoder(write(**changes)), torch.float32)
    assert reason in str(refused.value)


def test_a_pickle_is_never_read(write: Write) -> None:
    path = write()
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="no safetensors weights"):
        open_encoder(path)
    with pytest.raises(ModelError, match="is a folder"):
        open_encoder(path / "config.json")


def test_a_damaged_model_is_fetched_anew(
    embedding_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder counts as there only when each of its files is the one expected."""
    from engine.models import store

    copy = tmp_path / "models" / embedding_model.name
    shutil.copytree(embedding_model, copy)
    monkeypatch.setattr(store, "_download", lambda *_: pytest.fail("it was whole"))
    assert store.pull("all-minilm-l6-v2", tmp_path).path == copy
    (copy / "1_Pooling/config.json").write_text("{}")
    monkeypatch.setattr(store, "_download", _no_network)
    with pytest.raises(ModelError, match="no network"):
        store.pull("all-minilm-l6-v2", tmp_path)


def _no_network(*_: object) -> Path:
    raise ModelError("no network")
