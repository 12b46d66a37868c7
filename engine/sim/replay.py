"""Record every call a scheduler gets, play it again, and tell where plans differ. Shadow mode does that live.

`python -m engine.sim.replay FILE` proves that the plans are identical; with `--policy NAME` it shows what that policy
would have planned on the very same views.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.scheduler import POLICIES, Scheduler, SchedulerConfig, create
from engine.scheduler.contract import Accounts, Advance, Request, Room
from engine.scheduler.step import StepOutcome, StepPlan

__all__ = ["Divergence", "Recorder", "Shadow", "compare", "main", "replay"]


class Recorder:
    """A scheduler whose calls go to `write`, one JSON line each. It decides nothing itself."""

    def __init__(self, scheduler: Scheduler, write: Callable[[bytes], object]) -> None:
        self._scheduler, self._write = scheduler, write
        config = msgspec.to_builtins(scheduler.config, str_keys=True)
        self._line(["config", scheduler.policy.name, config])

    def _line(self, item: list[Any]) -> None:
        self._write(msgspec.json.encode(item) + b"\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def submit(self, request: Request, now: float) -> None:
        self._line(["submit", now, request])
        self._scheduler.submit(request, now)

    def end(self, sequence: int, now: float) -> None:
        self._line(["end", now, sequence])
        self._scheduler.end(sequence, now)

    def plan(self, now: float, accounts: Accounts | None = None) -> StepPlan:
        plan = self._scheduler.plan(now, accounts)
        told = None
        if accounts is not None:
            told = [list(accounts.deficits.items()), [[*key, v] for key, v in accounts.counters.items()]]
        self._line(["plan", now, told, plan])
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> tuple[Advance, ...]:
        self._line(["commit", now, outcome])
        return self._scheduler.commit(plan, outcome, now)

    def room(self, now: float) -> Mapping[int, Room]:
        return self._scheduler.room(now)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two plans on one view: sequences that only one of them computes, starts or parks."""

    step: int
    policy: str
    only_recorded: tuple[int, ...]
    only_other: tuple[int, ...]
    parks: tuple[int, int]


def compare(recorded: StepPlan, other: StepPlan, policy: str) -> Divergence | None:
    """None when both would compute the same slices and park the same sequences."""
    if recorded.slices == other.slices and recorded.parks == other.parks:
        return None
    ours, theirs = ({s.sequence for s in plan.slices} for plan in (recorded, other))
    only = tuple(sorted(ours - theirs)), tuple(sorted(theirs - ours))
    return Divergence(recorded.step, policy, *only, (len(recorded.parks), len(other.parks)))


class Shadow:
    """Every k-th step other policies plan on the same view, inside a time cap; differences go to `tell`."""

    def __init__(
        self, scheduler: Scheduler, policies: Sequence[str], tell: Callable[[Divergence], object],
        clock: Callable[[], float], every: int = 50, cap_s: float = 0.005,
    ) -> None:  # fmt: skip
        self._scheduler, self._tell, self._clock = scheduler, tell, clock
        self._policies = [POLICIES[name]() for name in policies]
        self._every, self._cap_s = every, cap_s
        self.asked: Counter[str] = Counter()
        self.differed: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def plan(self, now: float, accounts: Accounts | None = None) -> StepPlan:
        plan = self._scheduler.plan(now, accounts)
        if plan.step % self._every == 0:
            began = self._clock()
            for policy in self._policies:
                if self._clock() - began > self._cap_s:
                    break
                self.asked[policy.name] += 1
                found = compare(plan, self._scheduler.propose(policy, now), policy.name)
                if found is not None:
                    self.differed[policy.name] += 1
                    self._tell(found)
        return plan


def _config(values: dict[str, Any]) -> SchedulerConfig:
    values["floors"] = {int(tier): share for tier, share in values["floors"].items()}
    values["sheddable"] = frozenset(values["sheddable"])
    return SchedulerConfig(**values)


def replay(lines: Iterable[bytes], policy: str | None = None) -> Iterator[Divergence | None]:
    """For every recorded plan: None if it comes out the same again (or `policy` would have planned it too)."""
    scheduler: Scheduler | None = None
    other = POLICIES[policy]() if policy else None
    plan = StepPlan(0)
    for line in lines:
        kind, *rest = msgspec.json.decode(line)
        if kind == "config":
            scheduler = create(rest[0], _config(rest[1]))
            continue
        if scheduler is None:
            raise ValueError("the recording does not begin with its configuration")
        now = rest[0]
        if kind == "submit":
            scheduler.submit(msgspec.convert(rest[1], Request), now)
        elif kind == "end":
            scheduler.end(rest[1], now)
        elif kind == "plan":
            accounts = rest[1] and Accounts(dict(rest[1][0]), {(t, n): v for t, n, v in rest[1][1]})
            recorded = msgspec.convert(rest[2], StepPlan)
            plan = scheduler.plan(now, accounts)
            if other is None:
                yield compare(recorded, plan, scheduler.policy.name) if recorded != plan else None
            else:
                yield compare(recorded, scheduler.propose(other, now), other.name)
        else:
            scheduler.commit(plan, msgspec.convert(rest[1], StepOutcome), now)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sluice replay", description="Play a recorded scheduler again.")
    parser.add_argument("recording", type=Path)
    parser.add_argument("--policy", choices=sorted(POLICIES), help="compare with another policy on the same views")
    parser.add_argument("--show", type=int, default=10, help="differences to print")
    options = parser.parse_args(arguments)
    try:
        with options.recording.open("rb") as file:
            found = list(replay(file, options.policy))
    except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
        print(f"sluice replay: {options.recording}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    different = [d for d in found if d is not None]
    for divergence in different[: options.show]:
        print(divergence)  # noqa: T201
    print(f"{len(found)} plans, {len(different)} different")  # noqa: T201
    return 1 if different and options.policy is None else 0


if __name__ == "__main__":
    sys.exit(main())
