"""A real byte-level BPE tokenizer, small enough to train in a test, on a text whose characters span several tokens."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.protocol.messages import PROTOCOL_VERSION, ModelCard
from engine.text import Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer_json() -> str:
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(["the cat sat on the mat, the end. naïve café 北京 🦊🦊 stop STOP"] * 3, trainer)
    return built.to_str()


def toy_card(template: str = TEMPLATE, **changes: object) -> ModelCard:
    values: dict[str, object] = {
        "model": "toy",
        "hash": "toy",
        "protocol": PROTOCOL_VERSION,
        "context_length": 128,
        "vocab_size": 420,
        "eos_ids": (2,),
        "bos_id": 0,
        "add_bos": False,
        "tokenizer": tokenizer_json(),
        "chat_template": template,
        "capabilities": ("chat", "completion"),
        "price_class": "toy",
        "created_ms": 0,
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
    }
    return ModelCard(**(values | changes))  # type: ignore[arg-type]


def toy(template: str = TEMPLATE, **changes: object) -> Tokenizer:
    return Tokenizer(toy_card(template, **changes))
