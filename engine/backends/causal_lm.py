"""Causal language models on torch."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from engine.attention import HeadShape, KVStore, choose_kernels
from engine.backends.card import model_card
from engine.backends.contract import Capacity, Extras, SequenceInput
from engine.models import ModelError, open_checkpoint
from engine.models.architectures import build_decoder
from engine.products import open_products
from engine.protocol.messages import ModelCard
from engine.runner import Runner
from engine.runner.device import open_device
from engine.runner.grammar import Grammars
from engine.runner.memory import KVMemory
from engine.runner.sampler import Sampler
from engine.scheduler.step import StepOutcome, StepPlan

__all__ = ["CausalLM", "create", "default_dtype"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GIB = 1 << 30


class CausalLM:
    """A model, its KV memory and a runner, behind the backend contract. Make one with `load`."""

    def __init__(
        self, runner: Runner, card: ModelCard, capacity: Capacity, *, dtype: str, threads: int, fingerprint: str
    ) -> None:
        self.card = card
        self.capacity = capacity
        self.dtype = dtype
        self.threads = threads
        self._runner: Runner | None = runner
        self._fingerprint = fingerprint
        self._thread = 0

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        threads: int,
        dtype: str = "auto",
        kernels: str = "auto",
        quantization: str = "none",
        device: str = "auto",
        model: str = "",
        context_length: int = 0,
        kv_memory_bytes: int = _GIB,
        host_memory_bytes: int = _GIB // 2,
        block_size: int = 16,
        max_rows: int = 64,
        max_step_tokens: int = 512,
        price_class: str = "",
    ) -> CausalLM:
        """Read a GGUF file or a Hugging Face folder. Raises `ModelError` when it can't be used.

        `threads` is for this whole process: torch has one pool. `dtype` is fp32, bf16 or auto (what is fastest here).
        `quantization` is none or int8 (weights and activations; CPUs only), `device` auto, cpu, cuda or cuda:N.
        `model` names the model to clients (default: the file's name) and, unless told otherwise, in the price book;
        0 as `context_length` takes the model's own.
        """
        checkpoint = open_checkpoint(path)
        torch.set_num_threads(threads)
        place = open_device(device)
        dtype = default_dtype(place.name) if dtype == "auto" else dtype
        if dtype not in _DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}: auto, fp32 or bf16")
        config = checkpoint.config
        context = min(context_length or config.context_length, config.context_length)
        shape = HeadShape(config.heads, config.kv_heads, config.head_dim)
        widths = (config.hidden, config.intermediate)
        kernel_set = choose_kernels(
            kernels,
            _DTYPES[dtype],
            shape,
            block_size=block_size,
            widths=widths,
            threads=threads,
            device=place.name,
        )
        decoder = build_decoder(
            checkpoint, kernel_set, _DTYPES[dtype], context, quantization=quantization, device=place.name
        )
        block_bytes = KVStore.block_bytes(config.layers, shape, block_size, _DTYPES[dtype])
        device_blocks, host_blocks = kv_memory_bytes // block_bytes, host_memory_bytes // block_bytes
        if device_blocks < 1:
            raise ModelError(f"{path}: a KV memory of {kv_memory_bytes} bytes holds no block of {block_bytes}")
        memory = KVMemory(device_blocks, host_blocks, config.layers, shape, block_size, _DTYPES[dtype], place)
        capabilities: tuple[str, ...] = ("completion", "logprobs", "grammar")
        if checkpoint.text.chat_template:
            capabilities += ("chat", "tools")
        name = model or Path(path).stem.lower()
        card = model_card(
            checkpoint,
            name=name,
            context_length=context,
            capabilities=capabilities,
            price_class=price_class or name,
        )
        runner = Runner(decoder, memory, Sampler(checkpoint.text.eos_ids), Grammars(card), -(-context // block_size))
        capacity = Capacity(
            block_size=block_size,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            context_length=context,
            block_bytes=block_bytes,
        )
        identity = f"{checkpoint.content_hash()} {dtype} {quantization} {kernel_set.name} {block_size}"
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:32]
        return cls(runner, card, capacity, dtype=dtype, threads=threads, fingerprint=fingerprint)

    def add(self, sequence: SequenceInput) -> None:
        self._live().add(sequence)

    def execute(self, plan: StepPlan) -> StepOutcome:
        if self._thread != threading.get_ident():  # OpenMP keeps its number of threads for each calling thread
            torch.set_num_threads(self.threads)
            self._thread = threading.get_ident()
        return self._live().execute(plan)

    def extras(self) -> Extras:
        return self._live().extras()

    def fingerprint(self) -> str:
        return self._fingerprint

    def prepare(self, constraint: str, done: Callable[[str], None]) -> bool:
        return self._live().grammars.prepare(constraint, done)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.grammars.close()
        self._runner = None

    def _live(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the backend is closed")
        return self._runner


def default_dtype(device: str = "cpu") -> str:
    """bf16: half the memory to read. fp32 only on a CPU where nothing multiplies bf16, for want of a compiler too."""
    if device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported() or open_products() is not None:
        return "bf16"
    return "fp32"


create = CausalLM.load
"""What the registry calls."""
