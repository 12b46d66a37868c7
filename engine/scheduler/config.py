"""What a scheduler must be told of the engine it decides for, and the few numbers an operator may turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The first seven come from `backends.contract.Capacity`; the rest have defaults that suit a small model.

    Tiers are ranks: 0 is best. Costs are in weighted tokens (`w_in` per prompt token, `w_out` per output token).
    """

    block_size: int = 16
    device_blocks: int = 1024
    host_blocks: int = 0
    max_rows: int = 64
    max_step_tokens: int = 512
    context_length: int = 8192
    swap_bytes_per_s: float = 8e9
    block_bytes: int = 0

    w_in: float = 1.0
    w_out: float = 2.0
    w_cached: float = 0.1
    """Price of a prompt token that the prefix cache served, as a part of `w_in`."""
    floors: Mapping[int, float] = field(default_factory=lambda: {1: 0.1, 2: 0.05})
    """Guaranteed share of the token cost, by tier."""
    deficit_cap: float = 8192.0
    """Most a tier may save up (or owe) of its floor, weighted tokens."""
    floor_quantum: float = 1024.0
    """A floor admits once this much (or the prompt's cost, if more) is saved up, so that it gets real work done."""
    gate_tokens: float = 64.0
    """Δ: tenants this far above the smallest virtual counter may still go."""

    adaptive_chunk: bool = True
    """Size chunks from the least decode slack; False: always up to `max_step_tokens`."""
    whole_prefill: bool = False
    """Never split a prompt (for comparison, and for padded backends)."""
    min_chunk: int = 16
    """Prefill tokens that a step may always take, however late the decodes are: prefill never starves."""
    prefix_cache: bool = True
    preempt: bool = True
    express_rows: int = -1
    """Most rows that the queue may keep for light tenants, so that a flood can't fill them all (-1: 2 of every 8)."""
    min_stay_s: float = 0.25
    """A sequence that was just started or restored can't be evicted for this long, unless memory runs out."""
    aging_every: int = 16
    """After this many admissions of a tier its longest-waiting request goes first."""
    patience_s: float = 10.0
    """A request that waits this long and does not fit is not passed by smaller ones any more."""
    forecast_output: bool = True
    """Admit against the forecast of output too; False: against the prompt alone (for comparison)."""
    default_output: int = 256
    """Forecast of a tier's output length before any sequence of it has ended."""
    sheddable: frozenset[int] = frozenset({2})
    """Tiers whose requests may be refused early under overload."""

    window_s: float = 0.0
    """One-shot work: longest wait for a fuller batch (0: none)."""
    window_count: int = 0
    """One-shot work: dispatch at this many (0: `max_rows`)."""
    adaptive_window: bool = True
    """One-shot work: don't wait longer than the arrival rate promises company."""
    padded: bool = False
    """The backend pads one-shot batches to the longest: group them by length."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.device_blocks < 1 or self.max_rows < 1 or self.max_step_tokens < 1:
            raise ValueError("block_size, device_blocks, max_rows and max_step_tokens must be positive")
        if self.host_blocks < 0 or self.context_length < 1:
            raise ValueError("host_blocks can't be negative, context_length must be positive")
        if self.max_rows > self.max_step_tokens:
            raise ValueError("max_rows can't exceed max_step_tokens: every running sequence needs a token a step")
        if self.express_rows >= self.max_rows:
            raise ValueError("express_rows must leave rows for the others")
        if sum(self.floors.values()) >= 1.0 or min(self.floors.values(), default=0.0) < 0.0:
            raise ValueError("tier floors must be shares that sum to less than 1")
