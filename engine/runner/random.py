"""Counter-based random numbers: a pure function of what they are for, so a sequence can go on anywhere."""

from __future__ import annotations

import numpy as np

__all__ = ["PURPOSE_TOKEN", "uniforms"]

PURPOSE_TOKEN = 1
"""The draw that chooses a token."""


def uniforms(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, purpose: int) -> np.ndarray:
    """Uniform float64 in [0, 1) per row, from hash(seed, choice, position, purpose)."""
    state = _mix(seeds.astype(np.uint64))
    for word in (choices, positions, np.full(len(seeds), purpose)):
        state = _mix(state ^ _mix(word.astype(np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014); wraps modulo 2^64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
