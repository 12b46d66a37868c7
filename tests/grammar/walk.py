"""A model that knows nothing: it takes any allowed token, with some taste for ending what it has begun."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from engine.text import Tokenizer
from engine.text.grammar import Grammar, Vocabulary


def allowed(vocabulary: Vocabulary, grammar: Grammar) -> np.ndarray:
    """Ids of the tokens that may follow."""
    mask = np.zeros(vocabulary.words, np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary.size])


def walk(
    vocabulary: Vocabulary, tokenizer: Tokenizer, constraint: dict[str, Any], seed: int, longest: int = 400
) -> str | None:
    """The text of a random walk, or None when it had not ended after `longest` tokens."""
    grammar, random = vocabulary.compile(json.dumps(constraint)), np.random.default_rng(seed)
    closing = np.array([tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]", b",") for i in range(vocabulary.size)])
    tokens: list[int] = []
    for _ in range(longest):
        ids = allowed(vocabulary, grammar)
        assert len(ids), f"a dead end after {tokenizer.decode(tokens)!r}"
        may_end = bool(set(vocabulary.ends) & set(ids.tolist()))
        assert may_end == grammar.complete, tokenizer.decode(tokens)
        if may_end and (random.random() < 0.7 or len(ids) <= len(vocabulary.ends)):
            return tokenizer.decode(tokens)
        ids = ids[~np.isin(ids, vocabulary.ends)]
        likely = ids[closing[ids]]
        token = int(random.choice(likely if len(likely) and random.random() < 0.6 else ids))
        assert tokenizer.token_bytes(token), "a token without text"
        grammar.push([token])
        tokens.append(token)
    return None
