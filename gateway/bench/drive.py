"""Two ways to offer load.

Closed loop: a fixed number of users, each sends when its last reply ended; measures capacity.
Open loop: requests come when they come, whatever the server does; measures latency as real users feel it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from gateway.bench.client import Ask, Target, open_session, stream
from gateway.bench.metrics import Report, Trace
from gateway.bench.workload import Prompt, arrivals

__all__ = ["OnTrace", "run_closed", "run_open"]

OnTrace = Callable[[Trace], None]


async def run_closed(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    ask: Ask = Ask(),  # noqa: B008  (frozen)
    stop: asyncio.Event | None = None,
    on_trace: OnTrace | None = None,
) -> Report:
    """Each prompt once, `concurrency` at a time; tenants take turns. `stop` ends it early with what was measured."""
    report = Report(f"{concurrency} at a time", config={"mode": "closed", "concurrency": concurrency})
    async with open_session(ask) as session:
        run = _Run(target, ask, session, report, on_trace)
        left = iter(enumerate(prompts))

        async def user() -> None:
            for index, prompt in left:
                await run.send(index, prompt, run.clock())

        async def users() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(user())

        report.interrupted = await _until(stop, users())
    return report


async def run_open(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    rate: float,
    burstiness: float = 1.0,
    seed: int = 0,
    ask: Ask = Ask(),  # noqa: B008  (frozen)
    stop: asyncio.Event | None = None,
    on_trace: OnTrace | None = None,
) -> Report:
    """Each prompt once at its own time (`workload.arrivals`); TTFT counts from then, even if the client is late."""
    config = {"mode": "open", "rate": rate, "burstiness": burstiness, "seed": seed}
    report = Report(f"{rate:g}/s", config=config)
    times = arrivals(len(prompts), rate, burstiness, seed)
    async with open_session(ask) as session:
        run = _Run(target, ask, session, report, on_trace)

        async def send_all() -> None:
            async with asyncio.TaskGroup() as group:
                for index, (at, prompt) in enumerate(zip(times, prompts, strict=True)):
                    if (wait := at - run.clock()) > 0:
                        await asyncio.sleep(wait)
                    group.create_task(run.send(index, prompt, at))

        report.interrupted = await _until(stop, send_all())
    return report


class _Run:
    """The shared state of one run: its clock starts when it is made."""

    def __init__(
        self, target: Target, ask: Ask, session: aiohttp.ClientSession, report: Report, on_trace: OnTrace | None
    ) -> None:
        self._target, self._ask, self._session, self._report, self._on_trace = target, ask, session, report, on_trace
        self._url = target.url(ask.path())
        self._start = time.perf_counter()

    def clock(self) -> float:
        return time.perf_counter() - self._start

    async def send(self, index: int, prompt: Prompt, scheduled_s: float) -> None:
        """One request; its trace is kept also when it is cancelled half way."""
        tenant, key = self._target.keys[index % len(self._target.keys)]
        trace = Trace(index, tenant, scheduled_s, self.clock())
        try:
            body = self._ask.body(self._target.model, prompt)
            await stream(self._session, self._url, key, body, trace, self.clock)
        finally:
            trace.end_s = self.clock()
            self._report.traces.append(trace)
            if self._on_trace:
                self._on_trace(trace)


async def _until(stop: asyncio.Event | None, work: Coroutine[Any, Any, None]) -> bool:
    """Run the work to its end or to `stop`; True if it was stopped."""
    task = asyncio.create_task(work)
    halt = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({task, halt}, return_when=asyncio.FIRST_COMPLETED)
        stopped = not task.done()
    finally:
        halt.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    if not stopped:
        await task
    return stopped
