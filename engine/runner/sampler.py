"""Logits to tokens, all rows at once.

Order of operations: bias, then penalties, then forbidden end tokens (min_tokens), then what the row's grammar forbids;
temperature 0 takes the largest logit (the lowest id of equals). Otherwise divide by temperature, keep the ids that pass
min_p, top_k and top_p (in that order, each over what the one before left), and draw by inverse cumulative distribution
in order of token id. Log-probabilities reported are those of the model, before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.backends.contract import Logprob, TokenInfo
from engine.protocol.messages import Sampling
from engine.runner.batch import SampleRow
from engine.runner.grammar import Masks
from engine.runner.random import PURPOSE_TOKEN, uniforms

__all__ = ["Sampler", "token_infos"]

_CANDIDATES: Final = 512  # tried before a full sort: nearly always holds top_p of the mass
_FLOOR: Final = -9999.0  # of a reported log-probability: -inf is not JSON


class Sampler:
    """`ends` are the model's own end tokens (held back until `min_tokens` unless the request ignores them anyway)."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = tuple(ends)

    def sample(
        self, logits_RV: Tensor, rows: Sequence[SampleRow], masks: Masks | None = None
    ) -> tuple[list[int], list[bool]]:
        """(tokens, sound): a row with a logit that is not a number or all of them -inf is not sound, its token is 0."""
        logits_RV = self._adjusted(logits_RV, rows)
        if masks is not None:
            logits_RV = masks.apply(logits_RV)
        best_R = logits_RV.max(dim=-1)
        sound = torch.isfinite(best_R.values).tolist()
        tokens: list[int] = best_R.indices.tolist()
        drawn = [r for r, row in enumerate(rows) if row.state.source.sampling.temperature > 0 and sound[r]]
        if drawn:
            source = [rows[r].state.source for r in drawn]
            positions = np.array([rows[r].position for r in drawn])
            numbers = uniforms(
                np.array([s.seed & 0xFFFFFFFFFFFFFFFF for s in source], np.uint64),
                np.array([s.choice for s in source]),
                positions,
                PURPOSE_TOKEN,
            )
            chosen = _draw(logits_RV[drawn], [s.sampling for s in source], numbers)
            for r, token in zip(drawn, chosen, strict=True):
                tokens[r] = token
        return [t if ok else 0 for t, ok in zip(tokens, sound, strict=True)], sound

    def _adjusted(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Bias, penalties and forbidden tokens, touching only the rows and ids that have any."""
        changed = logits_RV
        for r, row in enumerate(rows):
            sampling = row.state.source.sampling
            if not _adjusts(sampling, row):
                continue
            if changed is logits_RV:
                changed = logits_RV.clone()
            _adjust(changed[r], sampling, row, self._ends)
        return changed


def _output_count(row: SampleRow) -> int:
    return row.position - row.state.source.prompt_length


def _adjusts(sampling: Sampling, row: SampleRow) -> bool:
    return (
        bool(sampling.logit_bias)
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or _output_count(row) < sampling.min_tokens
    )


def _adjust(logits_V: Tensor, sampling: Sampling, row: SampleRow, ends: tuple[int, ...]) -> None:
    size = logits_V.shape[0]
    if sampling.logit_bias:
        biased = {i: bias for i, bias in sampling.logit_bias.items() if 0 <= i < size}
        logits_V[list(biased)] += torch.tensor(list(biased.values()), dtype=logits_V.dtype)
    drafts = np.array(row.drafts, np.int64)
    if sampling.repetition_penalty != 1.0:  # CTRL, arXiv:1909.05858: over prompt and output
        seen = torch.from_numpy(np.unique(np.concatenate([row.state.tokens, drafts])))
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(np.concatenate([row.state.output, drafts]), return_counts=True)
        cost = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits_V[torch.from_numpy(ids)] -= torch.from_numpy(cost).to(logits_V.dtype)
    if _output_count(row) < sampling.min_tokens:
        forbidden = [i for i in {*ends, *sampling.stop_token_ids} if 0 <= i < size]
        logits_V[forbidden] = float("-inf")


def _draw(logits_RV: Tensor, sampling: list[Sampling], numbers: np.ndarray) -> list[int]:
    temperature_R1 = torch.tensor([[max(s.temperature, 1e-5)] for s in sampling])
    probs_RV = torch.softmax(logits_RV.double() / temperature_R1, dim=-1)
    vocabulary = probs_RV.shape[1]
    tokens = [0] * len(sampling)
    whole = [r for r, s in enumerate(sampling) if not _filters(s, vocabulary)]
    if whole:
        sums_RV = probs_RV[whole].cumsum(dim=-1)
        aims_R1 = torch.from_numpy(numbers[whole]).unsqueeze(1) * sums_RV[:, -1:]
        for r, at in zip(whole, torch.searchsorted(sums_RV, aims_R1, right=True)[:, 0].tolist(), strict=True):
            tokens[r] = min(at, vocabulary - 1)
    kept = [r for r, s in enumerate(sampling) if _filters(s, vocabulary)]
    if kept:
        for r, token in zip(
            kept, _draw_filtered(probs_RV[kept], [sampling[r] for r in kept], numbers[kept]), strict=True
        ):
            tokens[r] = token
    return tokens


def _filters(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.top_p < 1.0 or sampling.min_p > 0.0 or 0 < sampling.top_k < vocabulary


def _draw_filtered(probs_RV: Tensor, sampling: list[Sampling], numbers: np.ndarray) -> list[int]:
    vocabulary = probs_RV.shape[1]
    top = torch.topk(probs_RV, min(_CANDIDATES, vocabulary), dim=-1)
    values, indices = top.values.numpy(), top.indices.numpy()
    tokens = []
    for r, (wish, number) in enumerate(zip(sampling, numbers, strict=True)):
        ids, probs = _by_probability(values[r], indices[r])
        if len(ids) < vocabulary and not _enough(probs, wish):
            ids, probs = _by_probability(probs_RV[r].numpy(), np.arange(vocabulary))
        count = _kept(probs, wish)
        order = np.argsort(ids[:count])
        sums = probs[:count][order].cumsum()
        at = int(np.searchsorted(sums, number * sums[-1], side="right"))
        tokens.append(int(ids[order[min(at, count - 1)]]))
    return tokens


def _by_probability(probs: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Descending; equals by id."""
    order = np.lexsort((ids, -probs))
    return ids[order], probs[order]


def _enough(probs: np.ndarray, wish: Sampling) -> bool:
    """Whether what the filters keep certainly lies within these leading candidates."""
    if 0 < wish.top_k < len(probs):
        return True
    if wish.min_p > 0.0:
        return bool(probs[-1] < wish.min_p * probs[0])
    return wish.top_k == 0 and bool(probs.sum() > wish.top_p)  # a larger top_k needs its own total


def _kept(probs: np.ndarray, wish: Sampling) -> int:
    """How many of the descending probabilities pass; at least one does."""
    count = len(probs)
    total = 1.0
    if wish.min_p > 0.0:
        count = max(1, int(np.searchsorted(-probs, -wish.min_p * probs[0], side="right")))
        total = probs[:count].sum()
    if 0 < wish.top_k < count:
        count = wish.top_k
        total = probs[:count].sum()
    if wish.top_p < 1.0:  # the smallest set whose mass reaches top_p: a token stays if the mass before it doesn't
        before = probs[:count].cumsum() - probs[:count]
        count = max(1, int(np.searchsorted(before, wish.top_p * total, side="left")))
    return count


def token_infos(logits_RV: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[TokenInfo]:
    """The model's log-probability of each row's token, and of its `alternatives[r]` best ones."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    own = logprobs_RV.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0].tolist()
    most = min(max(alternatives, default=0), logits_RV.shape[1])
    best = torch.topk(logprobs_RV, most, dim=-1) if most else None
    infos = []
    for r, (token, logprob, count) in enumerate(zip(tokens, own, alternatives, strict=True)):
        pairs = zip(best.indices[r, :count].tolist(), best.values[r, :count].tolist(), strict=True) if best else ()
        infos.append(TokenInfo(token, _finite(logprob), tuple(Logprob(i, _finite(value)) for i, value in pairs)))
    return infos


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR) if logprob == logprob else _FLOOR
