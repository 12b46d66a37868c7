"""Drives a backend with hand-made plans: all sequences in one step, in chunks of a given size, parked when asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.backends.contract import Backend, SequenceInput, TokenInfo
from engine.protocol.messages import Sampling
from engine.scheduler.step import Drop, Extend, Park, Restore, Slice, Start, StepOutcome, StepPlan


@dataclass
class Live:
    source: SequenceInput
    known: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.output) >= self.source.sampling.max_tokens


class Driver:
    """`park_every` parks every sequence after each n-th step and restores it, elsewhere in the pool, with the next."""

    def __init__(self, backend: Backend, *, chunk: int = 10**6, park_every: int = 0) -> None:
        self.backend = backend
        self.chunk = chunk
        self.park_every = park_every
        self.step = 0
        self._number = 0
        self._free = list(range(backend.capacity.device_blocks))
        self._free_host = list(range(backend.capacity.host_blocks))

    def run(self, prompts: list[list[int]], sampling: list[Sampling], *, seed: int = 1) -> list[Live]:
        live = [self._add(prompt, how, seed) for prompt, how in zip(prompts, sampling, strict=True)]
        starts = tuple(Start(one.source.sequence, (), 0) for one in live)
        while any(not one.done for one in live):
            active = [one for one in live if not one.done]
            self._step(active, starts)
            starts = ()
            if self.park_every and self.step % self.park_every == 0:
                self._park_and_restore(active)
        for one in live:
            self._free += one.blocks
        self._execute(StepPlan(self.step, drops=tuple(Drop(one.source.sequence) for one in live)))
        return live

    def _add(self, prompt: list[int], sampling: Sampling, seed: int) -> Live:
        self._number += 1
        source = SequenceInput(self._number, tuple(prompt), len(prompt), sampling, seed, 0)
        self.backend.add(source)
        return Live(source, len(prompt))

    def _step(self, active: list[Live], starts: tuple[Start, ...]) -> None:
        slices, extends = [], []
        for one in active:
            length = min(self.chunk, one.known - one.computed)
            needed = -(-(one.computed + length) // self.backend.capacity.block_size) - len(one.blocks)
            if needed > 0:
                new = [self._free.pop(0) for _ in range(needed)]
                one.blocks += new
                extends.append(Extend(one.source.sequence, tuple(new)))
            slices.append(Slice(one.source.sequence, one.computed, length, one.computed + length == one.known))
        outcome = self._execute(StepPlan(self.step, tuple(slices), starts, tuple(extends)))
        assert not outcome.faults
        new_tokens = {sample.sequence: list(sample.tokens) for sample in outcome.samples}
        for one, part in zip(active, slices, strict=True):
            one.computed += part.length
            one.output += new_tokens.get(one.source.sequence, [])
            one.known += len(new_tokens.get(one.source.sequence, []))
            one.infos += self.backend.extras().logprobs.get(one.source.sequence, ())

    def _park_and_restore(self, active: list[Live]) -> None:
        parks, restores = [], []
        for one in active:
            number, held = one.source.sequence, len(one.blocks)
            host = tuple(self._free_host.pop() for _ in range(held))
            parks.append(Park(number, tuple(one.blocks), host, one.computed))
            self._free += one.blocks
            one.blocks = [self._free.pop(0) for _ in range(held)]
            restores.append(Restore(number, host, tuple(one.blocks), one.computed))
        self._execute(StepPlan(self.step, parks=tuple(parks)))
        self._execute(StepPlan(self.step, restores=tuple(restores)))
        self._free_host += [block for park in parks for block in park.host]

    def _execute(self, plan: StepPlan) -> StepOutcome:
        self.step += 1
        return self.backend.execute(plan)


def greedy(tokens: int, **options: object) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, **options)  # type: ignore[arg-type]
