"""The backend and the scheduler an engine runs, made from its command line."""

from __future__ import annotations

from typing import Any

from engine.backends.contract import Backend, Capacity
from engine.backends.registry import create as create_backend
from engine.scheduler import POLICIES, Scheduler, SchedulerConfig, create
from engine.serve.options import Options
from engine.serve.recording import Recorded, Tape

__all__ = ["build_backend", "build_scheduler"]


def build_backend(options: Options) -> Backend:
    """Load it. Raises ValueError or OSError with a sentence when the model can't be served."""
    if options.backend == "simulated":
        return create_backend("simulated", {"model": options.model_name, "simulate": options.simulate})
    given: dict[str, Any] = {
        "path": options.model,
        "threads": options.threads,
        "dtype": options.dtype,
        "model": options.model_name,
        "context_length": options.context,
    }
    if options.backend == "causal_lm":
        given |= {"kv_memory_bytes": options.kv_memory_mib << 20, "host_memory_bytes": options.host_memory_mib << 20}
        given["quantization"] = options.quantization
    sizes = {"max_rows": options.max_rows, "max_step_tokens": options.max_step_tokens}
    return create_backend(options.backend, given | {name: value for name, value in sizes.items() if value})


def build_scheduler(capacity: Capacity, options: Options, tape: Tape | None) -> Scheduler:
    """For what the backend can hold, or less where the command line says so."""
    rows = min(options.max_rows or capacity.max_rows, capacity.max_rows)
    tokens = min(options.max_step_tokens or capacity.max_step_tokens, capacity.max_step_tokens)
    config = SchedulerConfig(
        block_size=capacity.block_size,
        device_blocks=capacity.device_blocks,
        host_blocks=capacity.host_blocks,
        max_rows=rows,
        max_step_tokens=max(tokens, rows),
        context_length=capacity.context_length,
        swap_bytes_per_s=capacity.swap_bytes_per_s,
        window_s=options.batch_window_ms / 1000,
        block_bytes=capacity.block_bytes,
        prefix_cache=options.prefix_cache,
        whole_prefill=options.whole_prefill,
        adaptive_chunk=not options.whole_prefill,
        preempt=options.preempt,
        express_rows=options.express_rows,
    )
    return Recorded(config, POLICIES[options.policy](), tape.tell) if tape else create(options.policy, config)
