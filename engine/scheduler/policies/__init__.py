"""Policies: who goes first, and who may evict whom. They must not know blocks, budgets or how a step is built."""

from collections.abc import Callable

from engine.scheduler.policies.base import Policy
from engine.scheduler.policies.order import Deadline, Fair, Fcfs, Priority, Tiered

__all__ = ["POLICIES", "Policy"]

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "fair": Fair,
    "deadline": Deadline,
    "tiered": Tiered,
}
