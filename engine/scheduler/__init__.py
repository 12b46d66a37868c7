"""DECIDES: which tokens of which sequences are computed in the next step, and who is parked to make room.

Pure Python: it must not know torch, Redis, the wall clock or a random source; the time is an argument of every call.
"""

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.policies import POLICIES
from engine.scheduler.scheduler import Scheduler

__all__ = ["POLICIES", "Scheduler", "SchedulerConfig", "create"]


def create(policy: str = "tiered", config: SchedulerConfig | None = None) -> Scheduler:
    """A scheduler with the policy of that name. Raises ValueError for a name that isn't in `POLICIES`."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known are {', '.join(sorted(POLICIES))}")
    return Scheduler(config or SchedulerConfig(), POLICIES[policy]())
