"""`python -m engine.paced`: serve the pool `paced` from the queue, and the same over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys

from engine.paced.http import HttpFace
from engine.paced.queue import QueueFace
from engine.protocol.keys import DEFAULT_PREFIX
from engine.serve.link import SWITCH_S


def _options() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m engine.paced",
        description="An engine that only keeps time. A prompt that contains `pace 50 20` is answered with a first "
        "token after 50 ms, then 20 a second; `pace 50 hold` with one token, and then nothing until the client leaves.",
    )
    p.add_argument("--redis-url", default=os.environ.get("REDIS_URL", ""), help="serve the pool `paced` from there")
    p.add_argument("--prefix", default=os.environ.get("SLUICE_REDIS_PREFIX") or DEFAULT_PREFIX)
    p.add_argument("--host", default="127.0.0.1", help="address of the HTTP face (default: 127.0.0.1)")
    p.add_argument("--port", type=int, default=0, help="port of the HTTP face (default: none)")
    given = p.parse_args()
    if not given.redis_url and not given.port:
        p.error("give --redis-url, --port or both")
    return given


async def _serve(given: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    queue = QueueFace(given.redis_url, given.prefix, f"paced-{secrets.token_hex(4)}") if given.redis_url else None
    if queue is not None:
        queue.start()
    if given.port:
        await HttpFace().serve(given.host, given.port)
    while not stop.is_set() and not (queue is not None and queue.failed):
        await asyncio.wait({asyncio.create_task(stop.wait())}, timeout=0.5)
    if queue is None:
        return 0
    queue.stop()
    return 1 if queue.failed else 0


sys.setswitchinterval(SWITCH_S)
raise SystemExit(asyncio.run(_serve(_options())))
