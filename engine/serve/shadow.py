"""Shadow mode: at every k-th step other policies plan on the very same view. Nothing they decide is carried out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from engine.scheduler import POLICIES, Scheduler
from engine.scheduler.policies import Policy
from engine.scheduler.step import StepPlan

__all__ = ["Divergence", "Shadow", "compare"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two plans on one view: sequences that only one of them computes, and the parts of the plan that differ."""

    step: int
    policy: str
    only_first: tuple[int, ...]
    only_second: tuple[int, ...]
    parts: tuple[str, ...]


def compare(first: StepPlan, second: StepPlan, policy: str) -> Divergence | None:
    """None when both plans are the same. `policy` made the second."""
    if first == second:
        return None
    parts = tuple(name for name in StepPlan.__slots__ if getattr(first, name) != getattr(second, name))
    one, other = ({s.sequence for s in plan.slices} for plan in (first, second))
    return Divergence(first.step, policy, tuple(sorted(one - other)), tuple(sorted(other - one)), parts)


class _TimeUp(Exception):
    pass


class _Capped:
    """A policy that gives up planning when its time is over. The planner asks it for every candidate."""

    def __init__(self, policy: Policy, clock: Callable[[], float], until: float) -> None:
        self._policy, self._clock, self._until = policy, clock, until

    def __getattr__(self, name: str) -> Any:
        if self._clock() > self._until:
            raise _TimeUp
        return getattr(self._policy, name)


class Shadow:
    """Compares each plan it is shown with those of other policies, within `cap_s` for all of them together."""

    def __init__(
        self, scheduler: Scheduler, policies: Sequence[str], every: int, cap_s: float,
        tell: Callable[[Divergence], object], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._scheduler, self._tell, self._clock = scheduler, tell, clock
        self._policies = [POLICIES[name]() for name in policies]
        self._every, self._cap_s = every, cap_s
        self.counts = {name: Counter(asked=0, differed=0, cut=0) for name in policies}
        """By policy: plans it made, how many of them differed, and how often the time was over before."""

    def look(self, plan: StepPlan, now: float) -> None:
        """After `plan`, before it is carried out."""
        if plan.step % self._every:
            return
        until = self._clock() + self._cap_s
        for policy in list(self._policies):
            count = self.counts[policy.name]
            try:
                other = self._scheduler.propose(cast(Policy, _Capped(policy, self._clock, until)), now)
            except _TimeUp:
                count["cut"] += 1
                continue
            except Exception:  # a policy that fails in the shadow may not fail a request
                log.exception("the shadow policy %s failed and is not asked again", policy.name)
                self._policies.remove(policy)
                continue
            count["asked"] += 1
            found = compare(plan, other, policy.name)
            if found is not None:
                count["differed"] += 1
                self._tell(found)
