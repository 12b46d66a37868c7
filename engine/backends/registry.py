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

_ENVIRONMENT: Mapping[str, str] = {"GOMP_SPINCOUNT": "2000", "THP_MEM_ALLOC_ENABLE": "1"}
"""Read once, when torch is loaded; what the operator has set stays.

Threads that wait for each other spin for some tens of microseconds, then sleep. A step has hundreds of such waits, and
waking takes longer than most of them: sleeping at once cost a step of two threads a quarter, with busy neighbours more.
Spinning for long (the default) burns the very core that the other thread waits for: 248 ms instead of 136 on two busy
cores. Weights and KV lie in huge pages where the system offers them: attention over scattered blocks then takes a fifth
less.
"""


def create(name: str, options: Mapping[str, Any]) -> Backend:
    """A backend, ready to execute. Raises ValueError for an unknown name and TypeError for an unknown option."""
    module = BACKENDS.get(name)
    if module is None:
        raise ValueError(f"unknown backend {name!r}: {', '.join(BACKENDS)}")
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    backend: Backend = importlib.import_module(module).create(**options)
    return backend
