"""Requests to simulate: arrival processes, length distributions, trace files. Seeded, so a run can be repeated."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from pathlib import Path

__all__ = ["ARRIVALS", "LENGTHS", "TIERS", "Arrival", "Source", "Tier", "read_trace", "stream"]


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    rank: int
    ttft_s: float
    tpot_s: float


TIERS = (Tier("interactive", 0, 1.0, 0.1), Tier("standard", 1, 5.0, 0.2), Tier("batch", 2, 120.0, 1.0))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: lengths in tokens; `prefix` names a shared opening of `shared` tokens ("" for none)."""

    at_s: float
    tier: int
    tenant: str
    prompt: int
    output: int
    weight: float = 1.0
    prefix: str = ""
    shared: int = 0


Draw = Callable[[random.Random], float]

ARRIVALS: dict[str, Draw] = {
    "poisson": lambda r: r.expovariate(1.0),
    "gamma": lambda r: r.gammavariate(0.25, 4.0),  # coefficient of variation 2: bursty
    "pareto": lambda r: (r.paretovariate(1.5) - 1.0) / 2.0,  # mean 1, infinite variance
    "uniform": lambda r: 1.0,
    "backlog": lambda r: 0.0,  # all at once
}
"""Gaps between arrivals, mean 1 (but for "backlog")."""


def _clip(low: int, high: int, draw: Draw) -> Draw:
    return lambda r: max(low, min(high, int(draw(r))))


def _zipf(r: random.Random) -> float:
    return 8.0 * r.paretovariate(1.1)  # a power law of exponent 2.1


LENGTHS: dict[str, tuple[Draw, Draw]] = {
    # means 161 / 338 as the vLLM paper reports them for ShareGPT
    "sharegpt": (
        _clip(4, 2048, lambda r: r.lognormvariate(4.45, 1.12)),
        _clip(4, 1024, lambda r: r.lognormvariate(5.45, 1.0)),
    ),
    # Azure 2023 conversations: means 1155 / 211
    "azure": (
        _clip(16, 4096, lambda r: r.lognormvariate(6.75, 0.8)),
        _clip(4, 1000, lambda r: r.lognormvariate(5.0, 0.8)),
    ),
    "zipf": (_clip(8, 4096, _zipf), _clip(8, 1024, _zipf)),
    "exponential": (_clip(4, 1024, lambda r: r.expovariate(1 / 64)), _clip(1, 1024, lambda r: r.expovariate(1 / 64))),
    "short": (_clip(4, 64, lambda r: r.expovariate(1 / 16)), _clip(1, 64, lambda r: r.expovariate(1 / 8))),
}


@dataclass(frozen=True, slots=True)
class Source:
    """One tenant's traffic. `lengths` names a distribution or is "PROMPT/OUTPUT" for fixed lengths."""

    tenant: str
    tier: int
    rate: float
    count: int
    arrivals: str = "poisson"
    lengths: str = "sharegpt"
    weight: float = 1.0
    start_s: float = 0.0
    prefix: str = ""
    shared: int = 0

    def arrive(self, seed: int) -> Iterator[Arrival]:
        rng = random.Random(f"{seed}/{self.tenant}/{self.tier}")
        if self.lengths in LENGTHS:
            prompt, output = LENGTHS[self.lengths]
        else:
            fixed = [int(part) for part in self.lengths.split("/")]
            prompt, output = (lambda _: fixed[0]), (lambda _: fixed[1])
        gap, at = ARRIVALS[self.arrivals], self.start_s
        for _ in range(self.count):
            at += gap(rng) / self.rate
            length = self.shared + int(prompt(rng))
            yield Arrival(at, self.tier, self.tenant, length, int(output(rng)), self.weight, self.prefix, self.shared)


def stream(sources: list[Source], seed: int = 1) -> Iterator[Arrival]:
    """All sources in one, by arrival time (ties by the order of the sources)."""
    return merge(*(source.arrive(seed) for source in sources), key=lambda arrival: arrival.at_s)


def read_trace(path: Path) -> Iterator[Arrival]:
    """A CSV with a header: at_s,prompt,output and optionally tier,tenant,weight,prefix,shared. Raises ValueError."""
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                yield Arrival(
                    float(row["at_s"]), int(row.get("tier") or 0), row.get("tenant") or "trace", int(row["prompt"]),
                    int(row["output"]), float(row.get("weight") or 1.0), row.get("prefix") or "",
                    int(row.get("shared") or 0),
                )  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
