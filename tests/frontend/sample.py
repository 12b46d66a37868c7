"""Snapshots as the metering worker publishes them, and a publisher of real bytes into a real Redis."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from redis import Redis

Make = Callable[[int], dict[str, Any]]


def tenant(slug: str, **figures: Any) -> dict[str, Any]:
    base = {
        "tenant": slug,
        "name": slug.title(),
        "queued": 0,
        "oldest_wait_s": None,
        "running": 0,
        "tokens_per_s": 0.0,
        "ttft_p95_ms": None,
        "compliance": None,
        "money": "0",
        "requests": 0,
    }
    return base | figures


def tier(name: str, rank: int, target_ms: int, tenants: list[dict[str, Any]], **figures: Any) -> dict[str, Any]:
    base = {
        "tier": name,
        "rank": rank,
        "ttft_target_ms": target_ms,
        "tpot_target_ms": 100,
        "queued": sum(line["queued"] for line in tenants),
        "oldest_wait_s": None,
        "running": sum(line["running"] for line in tenants),
        "tokens_per_s": sum(line["tokens_per_s"] for line in tenants),
        "ttft_p95_ms": None,
        "compliance": None,
        "money": "0",
        "currency": "USD",
        "tenants": tenants,
    }
    return base | figures


def engine(name: str = "engine-1", **figures: Any) -> dict[str, Any]:
    now_ms = time.time_ns() // 1_000_000
    base = {
        "engine": name,
        "pool": "smollm2-135m",
        "model": "smollm2-135m",
        "card_hash": "c0ffee",
        "backend": "causal_lm",
        "state": "ready",
        "pid": 4242,
        "at_ms": now_ms - 300,
        "started_ms": now_ms - 600_000,
        "steps": 10_000,
        "running": 16,
        "waiting": 2,
        "parked": 1,
        "kv_blocks": 1024,
        "kv_free": 512,
        "kv_cached": 128,
        "block_size": 16,
        "tokens_per_s": 412.5,
        "prefill_tokens_per_s": 1480.0,
        "step_s": 0.0272,
        "by_tier": {"interactive": 6, "standard": 8, "batch": 2},
        "threads": 1,
        "device": "cpu",
        "dtype": "bfloat16",
        "version": "0.1.0",
        "age_ms": 300,
    }
    return base | figures


def snapshot(
    tiers: list[dict[str, Any]] | None = None, engines: list[dict[str, Any]] | None = None, **fields: Any
) -> dict[str, Any]:
    base = {
        "at_ms": time.time_ns() // 1_000_000,
        "window_s": 60,
        "tiers": loaded() if tiers is None else tiers,
        "engines": [engine()] if engines is None else engines,
        "events_lag_ms": 12,
    }
    return base | fields


def loaded(step: int = 0) -> list[dict[str, Any]]:
    """Three tiers under load; a tier's figures move with `step`."""
    swing = (step * 7) % 40
    return [
        tier(
            "interactive",
            0,
            1000,
            [
                tenant(
                    "alpha",
                    queued=1,
                    oldest_wait_s=0.184,
                    running=6,
                    tokens_per_s=148.2 + swing,
                    ttft_p95_ms=412.0 + 8 * swing,
                    compliance=0.998,
                    money="0.018422",
                    requests=1204,
                )
            ],
            oldest_wait_s=0.184,
            ttft_p95_ms=412.0 + 8 * swing,
            compliance=0.998,
            money="0.018422",
        ),
        tier(
            "standard",
            1,
            5000,
            [
                tenant(
                    "beta",
                    queued=7,
                    oldest_wait_s=4.31,
                    running=5,
                    tokens_per_s=120.4,
                    ttft_p95_ms=6210.0,
                    compliance=0.914,
                    money="0.0093115",
                    requests=618,
                ),
                tenant(
                    "delta",
                    queued=2,
                    oldest_wait_s=1.02,
                    running=3,
                    tokens_per_s=71.9,
                    ttft_p95_ms=2870.0,
                    compliance=1.0,
                    money="0.00421",
                    requests=290,
                ),
            ],
            oldest_wait_s=4.31,
            ttft_p95_ms=5400.0 - 30 * swing,
            compliance=0.941,
            money="0.0135215",
        ),
        tier(
            "batch",
            2,
            60_000,
            [tenant("gamma", queued=41, oldest_wait_s=95.0, running=2, tokens_per_s=72.0, money="0.0021", requests=88)],
            oldest_wait_s=95.0,
            money="0.0021",
        ),
    ]


class Publisher:
    """Publishes `make(step)` at once and then every `every_s` until stopped, as the metering worker does."""

    def __init__(self, redis_url: str, prefix: str, make: Make, every_s: float = 1.0) -> None:
        self.make = make
        self.step = 0
        self._key = f"{prefix}live"
        self._redis = Redis.from_url(redis_url)
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Publisher:
        self.publish()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._redis.close()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def publish(self) -> None:
        data = json.dumps(self.make(self.step))
        self.step += 1
        with self._redis.pipeline() as pipe:
            pipe.set(self._key, data)
            pipe.publish(self._key, data)
            pipe.execute()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self.publish()
