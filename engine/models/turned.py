"""A checkpoint whose hidden state is turned, so that what stands out in it is spread before it is rounded to 8 bits.

A few lanes of a transformer's activations are far larger than the rest and would take all of the 8 bits. An orthogonal
turn of the hidden state, and of each head's values, changes no result when the weights around it are turned back; the
norms' weights move into the matrices after them (QuaRot, arXiv:2404.00456). It costs nothing at run time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.models.checkpoint import Checkpoint

__all__ = ["TurnedCheckpoint"]

_SEED = 1
_INPUT_NORMS = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}


class TurnedCheckpoint:
    """The same model of the Llama family in other coordinates. Input and output embeddings are no longer tied."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = checkpoint
        self.path, self.name, self.text = checkpoint.path, checkpoint.name, checkpoint.text
        self.config = replace(checkpoint.config, tied_output=False)
        self._hidden = _orthogonal(checkpoint.config.hidden)
        self._head = _orthogonal(checkpoint.config.head_dim)

    def content_hash(self) -> str:
        return self._source.content_hash()

    def tensor(self, name: str) -> Tensor:
        read = self._source.tensor
        if name.endswith("norm.weight") and not name.endswith(("q_norm.weight", "k_norm.weight")):
            return torch.ones_like(read(name))
        if name == "model.embed_tokens.weight":
            return read(name) @ self._hidden
        if name == "lm_head.weight":
            head = read("model.embed_tokens.weight" if self._source.config.tied_output else name)
            return (head * read("model.norm.weight")) @ self._hidden
        part = name.split(".")[-2]
        if name.endswith(".bias"):
            return self._turn_heads(read(name)) if part == "v_proj" else read(name)
        if part in _INPUT_NORMS:
            norm = read(".".join([*name.split(".")[:-3], _INPUT_NORMS[part], "weight"]))
            weight = (read(name) * norm) @ self._hidden
            return self._turn_heads(weight.T).T.contiguous() if part == "v_proj" else weight
        weight = self._turn_heads(read(name)) if part == "o_proj" else read(name)
        return self._hidden.T @ weight

    def _turn_heads(self, x: Tensor) -> Tensor:
        """The last axis, head by head."""
        size = self.config.head_dim
        return (x.reshape(*x.shape[:-1], -1, size) @ self._head).reshape(x.shape)


def _orthogonal(size: int) -> Tensor:
    numbers = torch.randn(size, size, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return torch.linalg.qr(numbers).Q.float()
