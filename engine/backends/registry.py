"""Backends by name, imported only when asked for, so that the simulated one needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from engine.backends.contract import Backend

__all__ = ["BACKENDS", "create"]

BACKENDS: Mapping[str, str] = {
    "causal_lm": "engine.backends.causal_lm",
    "simulated": "engine.backends.simulated",
}
"""Name to module. The module has a function `create(**options) -> Backend`."""


def create(name: str, options: Mapping[str, Any]) -> Backend:
    """A backend, ready to execute. Raises ValueError for an unknown name and TypeError for an unknown option."""
    module = BACKENDS.get(name)
    if module is None:
        raise ValueError(f"unknown backend {name!r}: {', '.join(BACKENDS)}")
    backend: Backend = importlib.import_module(module).create(**options)
    return backend
