"""`python -m engine.serve`: one engine process."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from engine.backends.contract import Backend, Constraining
from engine.protocol.keys import Keys
from engine.serve.backends import build_backend, build_scheduler
from engine.serve.link import SWITCH_S, Link, connect
from engine.serve.log import Log
from engine.serve.loop import EXIT_FAULT, StepLoop
from engine.serve.options import Options, parse
from engine.serve.puller import Listener, Puller
from engine.serve.receiver import Receiver
from engine.serve.recording import Tape
from engine.serve.sender import Sender
from engine.serve.shadow import Divergence, Shadow
from engine.text import Tokenizer
from engine.text.grammar import COMMON

_FLUSH_S = 10.0
"""How long to wait for Redis to take the last replies and finals."""


class Engine:
    """The parts of one process, put together."""

    def __init__(self, options: Options, backend: Backend, log: Log) -> None:
        self.options, self.backend, self.log = options, backend, log
        keys, link = Keys(options.prefix), Link()
        self.sender = Sender(connect(options.redis_url), keys, options.pool, link, log)
        self.puller = Puller(
            connect(options.redis_url), keys, backend.card, options.engine, options.pool, options.lease_ms, link, log
        )
        self.listener = Listener(connect(options.redis_url), keys, options.engine, options.pool, link)
        self.receiver = Receiver(connect(options.redis_url), keys, options.engine, self.puller)
        self.tape = Tape(Path(options.record), options.record_mib << 20, log) if options.record else None
        scheduler = build_scheduler(backend.capacity, options, self.tape)
        tokenizer = Tokenizer(backend.card)
        self.loop = StepLoop(backend, scheduler, tokenizer, options.engine, link, self.sender, log, options.drain_s)
        if options.shadow:
            cap_s = options.shadow_cap_ms / 1000
            self.loop.shadow = Shadow(
                scheduler, options.shadow, options.shadow_every, cap_s, self._differs, time.perf_counter
            )
        facts = _facts(options, backend)
        self.puller.heartbeat = lambda: self.loop.heartbeat(facts)

    def _differs(self, found: Divergence) -> None:
        if self.tape is not None:
            self.tape.tell(("differs", found))
        self.log.info("shadow_differs", **asdict(found))

    def run(self) -> int:
        """Serve until drained, refused or broken. The exit status."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        for thread in filter(None, (self.tape, self.sender, self.puller, self.listener, self.receiver)):
            thread.start()
        if isinstance(self.backend, Constraining) and "grammar" in self.backend.card.capabilities:
            # Starts what compiles constraints, before the first request that has one would wait for it.
            self.backend.prepare(COMMON, lambda reason: None)
        status = EXIT_FAULT
        try:
            status = self.loop.run()
        finally:
            self._leave(status)
        return status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.loop.draining:
            os._exit(128 + number)
        self.loop.drain()

    def _leave(self, status: int) -> None:
        """Deliver what is left, then give the lease back, which hands on what could not be ended."""
        self.loop.link.quiet.set()
        if not self.sender.flush(_FLUSH_S):
            self.log.error("not_delivered", finals=self.sender.undelivered)
        self.puller.stop()
        self.listener.stopped.set()
        self.receiver.stopped.set()
        self.puller.join(timeout=2.0)
        if self.puller.registered.is_set():
            try:
                self.puller.functions.leave(self.options.pool, self.options.engine)
            except Exception as error:  # Redis is away: the lease lapses by itself
                self.log.warning("not_left", error=type(error).__name__)
        self.sender.stop()
        if self.tape is not None:
            self.tape.close(f"the engine stopped with status {status}", _FLUSH_S)
        self.backend.close()
        self.log.info("stopped", status=status)


def _facts(options: Options, backend: Backend) -> dict[str, object]:
    """The fields of a heartbeat that never change."""
    try:
        release = version("sluice")
    except PackageNotFoundError:
        release = ""
    return {
        "engine": options.engine,
        "pool": options.pool,
        "model": backend.card.model,
        "card_hash": backend.card.hash,
        "backend": backend.card.backend,
        "pid": os.getpid(),
        "started_ms": time.time_ns() // 1_000_000,
        "kv_blocks": backend.capacity.device_blocks,
        "block_size": backend.capacity.block_size,
        "threads": options.threads,
        "dtype": "" if options.backend == "simulated" else options.dtype,
        "version": release,
    }


def main() -> int:
    sys.setswitchinterval(SWITCH_S)
    options = parse()
    log = Log(options.log_level, engine=options.engine, pool=options.pool)
    started = time.monotonic()
    try:
        backend = build_backend(options)
        engine = Engine(options, backend, log)
    except (ValueError, OSError) as error:
        log.error("not_started", detail=str(error))
        return 1
    log.info("loaded", model=backend.card.model, seconds=round(time.monotonic() - started, 3))
    return engine.run()


if __name__ == "__main__":
    sys.exit(main())
