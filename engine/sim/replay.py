"""Play an engine's recording again: the same events must give the same plans. Other policies may plan beside them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.scheduler import POLICIES, Scheduler, SchedulerConfig, create
from engine.scheduler.contract import Accounts, Request
from engine.scheduler.step import StepOutcome, StepPlan
from engine.serve.recording import VERSION
from engine.serve.shadow import Divergence, compare

__all__ = ["Broken", "Replay", "main"]

_EPILOG = """examples:
  sluice up --engine-options "--record {engine}.jsonl"  (or: sluice engine … --record {engine}.jsonl); {engine} in the
                                                        name becomes the engine's, as in ENGINE.jsonl below
  sluice replay ENGINE.jsonl                            the plans come out the same, or the first difference is shown
  sluice replay ENGINE.jsonl --policy fcfs              what fcfs would have planned on the same views
  sluice replay ENGINE.jsonl --policy fcfs --policy priority    these two against each other

exit status: 0 when every recorded plan came out the same, 1 when one did not, 2 for a recording that can't be read to
             its end (cut off, or not a recording)
"""


class Broken(ValueError):
    """The recording can't be played on from here."""


class Replay:
    """One recording. Iterating plays it: a Divergence where a plan differs from the recorded one (that is the end), or
    where the compared policies differ from each other."""

    def __init__(self, lines: Iterable[bytes], policies: Sequence[str] = ()) -> None:
        self._lines = lines
        self._policies = [POLICIES[name]() for name in policies]
        self.plans = 0
        self.identical = True
        self.ended = ""
        """Why the recording stopped; empty while it has not been played to its end."""

    def __iter__(self) -> Iterator[Divergence]:
        scheduler: Scheduler | None = None
        plan = StepPlan(0)
        for number, line in enumerate(self._lines, 1):
            try:
                name, *rest = msgspec.json.decode(line)
                if scheduler is None:
                    scheduler = _begin(name, rest)
                elif name == "plan":
                    plan = scheduler.plan(rest[0], _accounts(rest[1]))
                    yield from self._compare(scheduler, msgspec.convert(rest[2], StepPlan), plan, rest[0])
                elif name == "stop":
                    self.ended = rest[0]
                else:
                    _apply(scheduler, name, rest, plan)
            except (ValueError, LookupError, TypeError, AssertionError) as error:  # msgspec's errors are ValueErrors
                raise Broken(f"line {number} can't be played: {error}") from error
            if not self.identical:
                return
        if not self.ended:
            raise Broken("it has no last line: it was cut off, or its engine was killed")

    def _compare(self, scheduler: Scheduler, recorded: StepPlan, plan: StepPlan, now: float) -> Iterator[Divergence]:
        self.plans += 1
        found = compare(recorded, plan, scheduler.policy.name)
        if found is not None:
            self.identical = False
            yield found
            return
        proposed = [plan, *(scheduler.propose(policy, now) for policy in self._policies)]
        first = proposed[1 if len(self._policies) > 1 else 0]
        for policy, other in zip(self._policies, proposed[1:], strict=True):
            if other is not first and (found := compare(first, other, policy.name)) is not None:
                yield found


def _begin(name: str, rest: list[Any]) -> Scheduler:
    if name != "recording" or rest[0] != VERSION:
        raise ValueError(f"this is no recording of version {VERSION}")
    return create(rest[1], msgspec.convert(rest[2], SchedulerConfig, str_keys=True))


def _accounts(told: list[Any] | None) -> Accounts | None:
    return Accounts(dict(told[0]), {(tier, tenant): v for tier, tenant, v in told[1]}) if told else None


def _apply(scheduler: Scheduler, name: str, rest: list[Any], plan: StepPlan) -> None:
    """One event that is not a plan."""
    match name:
        case "submit":
            scheduler.submit(msgspec.convert(rest[1], Request), rest[0])
        case "end":
            scheduler.end(rest[1], rest[0])
        case "commit":
            scheduler.commit(plan, msgspec.convert(rest[1], StepOutcome), rest[0])
        case "told":
            scheduler.take_charges()
        case "differs":
            pass
        case _:
            raise ValueError(f"unknown event {name!r}")


def _play(replay: Replay, show: int) -> Counter[str]:
    """Play to the end and print the first differences. How many there were, by policy."""
    differ: Counter[str] = Counter()
    for d in replay:
        differ[d.policy] += 1
        if differ.total() <= show:
            what = f"{d.policy} plans otherwise" if replay.identical else "the plan is not the recorded one"
            print(f"step {d.step}: {what}: {', '.join(d.parts)} differ", end="")  # noqa: T201
            print(f"; only there {list(d.only_first)}, only here {list(d.only_second)}")  # noqa: T201
    return differ


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice replay",
        description="Play what an engine recorded (--record) through the scheduler again.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path)
    parser.add_argument("--policy", action="append", default=[], choices=sorted(POLICIES), help="compare these too")
    parser.add_argument("--show", type=int, default=10, help="differences to print (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with options.recording.open("rb") as file:
            replay = Replay(file, options.policy)
            differ = _play(replay, options.show)
    except Broken as error:
        so_far = f"the {replay.plans} plans before that are as recorded"
        print(f"sluice replay: {options.recording}: {error}; {so_far}", file=sys.stderr)  # noqa: T201
        return 2
    except OSError as error:
        print(f"sluice replay: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if not replay.identical:
        print(f"{replay.plans} plans, the last is not the recorded one")  # noqa: T201
        return 1
    print(f"{replay.plans} plans, all as recorded; the recording ended because {replay.ended}")  # noqa: T201
    for name in options.policy[-1:] if len(options.policy) == 2 else options.policy:
        against = f" from {options.policy[0]}" if len(options.policy) > 1 else ""
        print(f"{name} differs{against} in {differ[name]}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
