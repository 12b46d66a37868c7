"""Backends by name, imported only when asked for, so that the simulated one needs no torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from engine.backends.contract import Backend

__all__ = ["BACKENDS", "create"]

BACKENDS: Mapping[str, str] = {
    "causal_lm": "engine.backends.causal_lm",
    "embedding": "engine.backends.embedding",
    "image": "engine.backends.image",
    "simulated": "engine.backends.simulated",
}
"""Name to module. The module has a function `create(**options) -> Backend`."""

_SPIN_COUNT = "0"
"""Threads that wait for each other sleep at once. Spinning (the default) gains microseconds on an idle machine, but
with any busy neighbour it burns the very core the other thread waits for: steps then take many times as long."""


def create(name: str, options: Mapping[str, Any]) -> Backend:
    """A backend, ready to execute. Raises ValueError for an unknown name and TypeError for an unknown option."""
    module = BACKENDS.get(name)
    if module is None:
        raise ValueError(f"unknown backend {name!r}: {', '.join(BACKENDS)}")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # read once, when torch loads its OpenMP library
    backend: Backend = importlib.import_module(module).create(**options)
    return backend
