"""What a gateway itself costs in front of an engine of exactly known timing, alone and beside others.

The engine is `python -m engine.paced`: the first token of a request is due a fixed time after the engine has it, the
later ones at the ends of steps. So what a client measures beyond that was added on the way, there and back:

added TTFT = (request sent -> first token read) - the engine's delay.
added gap  = (time between two tokens of a stream, from the second on) - the engine's step.

Both hold what the client and the kernel take, which the row "direct" shows: the same client on the same engine with
nothing between. Streams begin evenly spread and with random pauses: opening hundreds at once would measure a burst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from gateway.bench.client import Unreachable
from gateway.bench.lean import Front, Stamps, hold_idle, hold_unread, steady
from gateway.bench.metrics import Spread

__all__ = ["READERS", "TPS", "TTFT_S", "UNREAD_TPS", "Found", "Idle", "Level", "Plan", "Run", "Unread", "compare"]

TTFT_S = 0.05
TPS = 20
STARTS_PER_S = 40
"""About so many requests a second begin at every level (where streams are that short): enough for a 99th percentile."""
FEW = 8
READERS = 30
UNREAD_TPS = 100
FILL_S = 5.0
"""By then what the kernel holds for a client that reads nothing is full."""


@dataclass(frozen=True, slots=True)
class Level:
    """So many streams at a time, each of so many tokens."""

    streams: int

    @property
    def longer(self) -> int:
        """How many times as long it is measured: a single stream makes few requests."""
        return 4 if self.streams < FEW else 1

    @property
    def tokens(self) -> int:
        return max(2, self.streams * TPS // STARTS_PER_S)


@dataclass(frozen=True, slots=True)
class Run:
    """One front at one level: what was added to each first token and to each gap, in seconds."""

    front: str
    streams: int
    seconds: float
    requests: int
    events: int
    ttft_s: list[float]
    gap_s: list[float]
    cpu_s: float | None
    wrong: dict[str, int]

    @property
    def events_per_core(self) -> float | None:
        """Tokens passed on for each second of processor time, all else that it does (admission, records) included."""
        return self.events / self.cpu_s if self.cpu_s else None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, of each front: levels in so many rounds of so many seconds, and if not 0 the other two."""

    levels: Sequence[int]
    rounds: int
    seconds: float
    idle: int = 0
    unread: int = 0
    warm_s: float = 2.0
    """Before each measurement."""


@dataclass(slots=True)
class Found:
    """What was measured so far."""

    runs: list[Run] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)


async def compare(plan: Plan, fronts: Sequence[Front], stop: asyncio.Event, say: Callable[[str], None]) -> Found:
    """Each front in turn, the order turning from round to round. `stop` ends it with what there is. Memory comes first:
    later it would hold what loads before have left behind."""
    found = Found()
    if plan.idle:
        for front in (f for f in fronts if f.pids):
            say(f"{plan.idle} idle streams: {front.name}")
            found.idle.append(await idle_memory(front, plan.idle))
    for number in range(plan.rounds if plan.levels else 0):
        for streams in plan.levels:
            for front in fronts if number % 2 == 0 else reversed(fronts):
                if stop.is_set():
                    return found
                say(f"round {number + 1} of {plan.rounds}, {streams} streams: {front.name}")
                level = Level(streams)
                found.runs.append(await measure(front, level, plan.seconds * level.longer, plan.warm_s))
    if plan.unread and not stop.is_set():
        say(f"{READERS} readers with and without {plan.unread} clients that read nothing, {plan.rounds} pairs")
        found.unread.append(await unread(fronts[0], plan.unread, plan.rounds, plan.seconds))
    return found


async def measure(front: Front, level: Level, seconds: float, warm_s: float) -> Run:
    """Hold the level for `seconds` after a while of warming up."""
    start = time.perf_counter() + max(warm_s, level.tokens / TPS)
    end = start + seconds
    prompt = f"pace {TTFT_S * 1000:.0f} {TPS}"
    work = steady(
        front,
        streams=level.streams,
        prompt=prompt,
        tokens=level.tokens,
        until=end,
        spread_s=level.tokens / TPS,
        pause_s=1 / TPS,
    )
    task = asyncio.create_task(work)
    await asyncio.sleep(start - time.perf_counter())
    busy = processor_s(front.pids)
    found = await task
    spent = processor_s(front.pids)
    cpu_s = spent - busy if spent is not None and busy is not None else None
    return _run(front.name, level.streams, found, start, end, cpu_s)


def _run(front: str, streams: int, found: Sequence[Stamps], start: float, end: float, cpu_s: float | None) -> Run:
    within = [s for s in found if start <= s.sent_s < end - TTFT_S * 2]
    wrong: dict[str, int] = {}
    for s in within:
        if s.wrong:
            wrong[s.wrong] = wrong.get(s.wrong, 0) + 1
    gaps = [b - a - 1 / TPS for s in found for a, b in pairwise(s.tokens_s[1:]) if b >= start]
    return Run(
        front,
        streams,
        end - start,
        len(within),
        sum(start <= t < end for s in found for t in s.tokens_s),
        # A first token that hadn't come by the end counts as late as it is known to be.
        [(s.tokens_s[0] if s.tokens_s else end) - s.sent_s - TTFT_S for s in within if not s.wrong],
        gaps,
        cpu_s,
        wrong,
    )


@dataclass(frozen=True, slots=True)
class Idle:
    """Memory with `streams` open that say nothing."""

    front: str
    streams: int
    before_mib: float
    with_mib: float

    @property
    def kib_per_stream(self) -> float:
        return (self.with_mib - self.before_mib) * 1024 / self.streams


async def idle_memory(front: Front, streams: int, settle_s: float = 2.0) -> Idle:
    """Resident memory of the front's processes before and while. Says something only the first time: a process seldom
    gives memory back. Raises Unreachable or TimeoutError when they can't be opened."""
    before = resident_mib(front.pids)
    close = await hold_idle(front, streams)
    await asyncio.sleep(settle_s)
    found = Idle(front.name, streams, before, resident_mib(front.pids))
    close()
    await asyncio.sleep(settle_s)
    return found


@dataclass(slots=True)
class Unread:
    """Pairs of runs of the same readers: alone, and beside clients that read nothing."""

    front: str
    clients: int
    alone_ms: list[float] = field(default_factory=list)
    """99th percentile of the readers' gaps, run by run."""
    beside_ms: list[float] = field(default_factory=list)
    grown_mib: list[float] = field(default_factory=list)
    """By how much the front's memory grew while they were there."""

    @property
    def ratio(self) -> float:
        return median(b / a for a, b in zip(self.alone_ms, self.beside_ms, strict=True))


async def unread(front: Front, clients: int, pairs: int, seconds: float) -> Unread:
    """In turn, the order changing from pair to pair."""
    found = Unread(front.name, clients)
    for number in range(pairs):
        for beside in (False, True) if number % 2 == 0 else (True, False):
            gap_ms, grown = await _readers(front, clients if beside else 0, seconds)
            (found.beside_ms if beside else found.alone_ms).append(gap_ms)
            if beside:
                found.grown_mib.append(grown)
    return found


async def _readers(front: Front, clients: int, seconds: float) -> tuple[float, float]:
    before = resident_mib(front.pids)
    prompt, tokens = f"pace 50 {UNREAD_TPS}", round((seconds + FILL_S) * UNREAD_TPS * 2)
    close = await hold_unread(front, clients, prompt, tokens)
    try:
        start = time.perf_counter() + FILL_S
        found = await steady(
            front, streams=READERS, prompt=prompt, tokens=tokens, until=start + seconds, spread_s=1.0, pause_s=0.0
        )
        grown = resident_mib(front.pids) - before
    finally:
        close()
    await asyncio.sleep(1.0)
    gaps = Spread.of(b - a for s in found for a, b in pairwise(s.tokens_s) if a >= start)
    if gaps is None or gaps.p99 is None:
        wrong = {s.wrong for s in found if s.wrong}
        raise Unreachable(f"{front.name}: the readers got too little ({', '.join(wrong) or 'no error'})")
    return gaps.p99, grown


def processor_s(pids: Sequence[int]) -> float | None:
    """Processor time of these processes so far, user and system; None without any, or where it can't be read."""
    total = 0.0
    for pid in pids:
        try:
            total += time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3); /proc counts in hundredths of a second
        except OSError:
            return None
    return total or None


def resident_mib(pids: Sequence[int]) -> float:
    """Resident memory of these processes; 0 of what can't be read."""
    kib = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        kib += next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
    return kib / 1024
