"""Logits to tokens, all rows at once.

Order of operations: bias, then penalties, then forbidden end tokens (min_tokens), then what the row's grammar forbids;
temperature 0 takes the largest logit (the lowest id of equals). Otherwise divide by temperature, keep the ids that pass
min_p, top_k and top_p (in that order, each over what the one before left), and draw by inverse cumulative distribution
in order of token id. Log-probabilities reported are those of the model, before any of this.
"""

from __future__ import annotations

import math
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

_DEPTHS: Final = (3.0, 6.0, 9.0, 13.0)
"""How far below the largest exponent candidates are looked for before all are sorted: a few dozen ids, mostly."""
_FLOOR: Final = -9999.0  # of a reported log-probability: -inf is not JSON


class Sampler:
    """`ends` are the model's own end tokens (held back until `min_tokens` unless the request ignores them anyway)."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = tuple(ends)
        self._scratch = _Scratch(0)

    def sample(
        self, logits_RV: Tensor, rows: Sequence[SampleRow], masks: Masks | None = None
    ) -> tuple[list[int], list[bool]]:
        """(tokens, sound): a row with a logit that is not a number or all of them -inf is not sound, its token is 0."""
        logits_RV = self._adjusted(logits_RV, rows)
        if masks is not None:
            logits_RV = masks.apply(logits_RV)
        values_RV = logits_RV.numpy()
        best_R = values_RV.argmax(axis=1)  # the first of equals, or the first that is not a number
        peak_R = values_RV[np.arange(len(rows)), best_R]
        sound: list[bool] = np.isfinite(peak_R).tolist()
        tokens: list[int] = best_R.tolist()
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
            if len(self._scratch.exponents) != values_RV.shape[1]:
                self._scratch = _Scratch(values_RV.shape[1])
            for r, s, number in zip(drawn, source, numbers.tolist(), strict=True):
                tokens[r] = _draw(values_RV[r], float(peak_R[r]), s.sampling, number, self._scratch)
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


class _Scratch:
    """Room for a row's numbers, so that no step asks the system for memory."""

    def __init__(self, vocabulary: int) -> None:
        self.exponents = np.empty(vocabulary, np.float32)
        self.weights = np.empty(vocabulary, np.float32)
        self.sums = np.empty(vocabulary, np.float64)


def _draw(logits_V: np.ndarray, peak: float, wish: Sampling, number: float, scratch: _Scratch) -> int:
    """Exponents of all ids are float32: that is enough for a sum. What is chosen among is weighed in float64."""
    temperature = max(wish.temperature, 1e-5)
    exponents_V = np.subtract(logits_V, np.float32(peak), out=scratch.exponents)
    exponents_V *= np.float32(1 / temperature)
    filters = wish.top_p < 1.0 or wish.min_p > 0.0 or 0 < wish.top_k < len(logits_V)
    if not filters:
        sums = np.exp(exponents_V, out=scratch.weights).cumsum(dtype=np.float64, out=scratch.sums)
        return min(int(np.searchsorted(sums, number * sums[-1], side="right")), len(sums) - 1)
    total = float(np.exp(exponents_V, out=scratch.weights).sum(dtype=np.float64)) if _needs_total(wish) else 1.0
    for depth in (*_first_depth(wish), *_DEPTHS, np.inf):
        ids = np.flatnonzero(exponents_V >= -depth)
        weights = np.exp((logits_V[ids].astype(np.float64) - peak) / temperature)
        if depth == np.inf or _enough(weights, wish, depth, total):
            break
    ids, weights = _by_probability(weights, ids)
    count = _kept(weights, wish, total)
    order = np.argsort(ids[:count])
    sums = weights[:count][order].cumsum()
    at = int(np.searchsorted(sums, number * sums[-1], side="right"))
    return int(ids[order[min(at, count - 1)]])


def _needs_total(wish: Sampling) -> bool:
    """top_p is a share of all mass, unless another filter went before it."""
    return wish.top_p < 1.0 and wish.min_p == 0.0 and wish.top_k == 0


def _first_depth(wish: Sampling) -> tuple[float, ...]:
    """min_p says itself how deep to look; a little more, for float32."""
    return (-math.log(wish.min_p) * 1.001 + 0.001,) if wish.min_p > 0.0 else ()


def _by_probability(probs: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Descending; equals by id."""
    order = np.lexsort((ids, -probs))
    return ids[order], probs[order]


def _enough(weights: np.ndarray, wish: Sampling, depth: float, total: float) -> bool:
    """Whether what the filters keep certainly lies within these candidates, which are all down to `depth`."""
    if wish.min_p > 0.0:
        return depth >= _first_depth(wish)[0]
    if wish.top_k > 0:
        return len(weights) >= wish.top_k
    return bool(weights.sum() > wish.top_p * total * (1 + 1e-6))


def _kept(weights: np.ndarray, wish: Sampling, total: float) -> int:
    """How many of the descending weights pass; at least one does. `total` is the weight of all ids."""
    count = len(weights)
    if wish.min_p > 0.0:
        count = max(1, int(np.searchsorted(-weights, -wish.min_p * weights[0], side="right")))
        total = weights[:count].sum()
    if wish.top_k > 0:
        count = min(wish.top_k, count)
        total = weights[:count].sum()
    if wish.top_p < 1.0:  # the smallest set whose mass reaches top_p: a token stays if the mass before it doesn't
        before = weights[:count].cumsum() - weights[:count]
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
