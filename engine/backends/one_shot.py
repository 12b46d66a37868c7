"""What one-shot backends share: a slice is a whole input and ends it, and its result is a row of numbers."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.backends.contract import Capacity, Extras
from engine.protocol.messages import ModelCard
from engine.scheduler.step import StepOutcome, StepPlan

__all__ = ["DTYPES", "OneShot", "dtype_of"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Input = TypeVar("Input")
Model = TypeVar("Model")


def dtype_of(name: str) -> str:
    """`auto` is fp32, so that results don't depend on the machine. Raises ValueError for a name that is unknown."""
    name = "fp32" if name == "auto" else name
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: auto, fp32 or bf16")
    return name


class OneShot(ABC, Generic[Input, Model]):
    """Keeps what waits, computes the inputs that a plan names together, and puts their rows into `extras`."""

    def __init__(self, model: Model, card: ModelCard, capacity: Capacity, *, threads: int, fingerprint: str) -> None:
        self._model: Model | None = model
        self.card = card
        self.capacity = capacity
        self.threads = threads
        self._fingerprint = fingerprint
        self._inputs: dict[int, Input] = {}
        self._extras = Extras()
        self._thread = 0

    @abstractmethod
    def _rows(self, model: Model, inputs: list[Input]) -> Tensor:
        """Float results [inputs, …], in the order of the inputs."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        if self._thread != threading.get_ident():  # OpenMP keeps its number of threads for each calling thread
            torch.set_num_threads(self.threads)
            self._thread = threading.get_ident()
        started = time.perf_counter()
        self._extras = Extras()
        for drop in plan.drops:
            self._inputs.pop(drop.sequence, None)
        faults = self._compute([s.sequence for s in plan.slices]) if plan.slices else ()
        return StepOutcome(step=plan.step, seconds=time.perf_counter() - started, faults=faults)

    def _compute(self, sequences: list[int]) -> tuple[tuple[int, str], ...]:
        """The sequences whose numbers overflowed, with the reason."""
        if self._model is None:
            raise RuntimeError("the backend is closed")
        with torch.inference_mode():
            rows_BN = self._rows(self._model, [self._inputs[sequence] for sequence in sequences])
            finite_B = rows_BN.isfinite().all(1).tolist()
        faults: list[tuple[int, str]] = []
        for sequence, row, finite in zip(sequences, rows_BN.tolist(), finite_B, strict=True):
            if finite:
                self._extras.vectors[sequence] = row
            else:
                faults.append((sequence, "the model's numbers overflowed"))
        return tuple(faults)

    def extras(self) -> Extras:
        return self._extras

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self) -> None:
        self._model = None
        self._inputs.clear()
        self._extras = Extras()
