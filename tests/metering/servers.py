"""What stands around the metering worker: a model card, and a Postgres that can be away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connection
from psycopg import sql
from redis.client import Redis

from engine.protocol.events import Event, Kind
from engine.protocol.keys import Keys
from engine.protocol.messages import PROTOCOL_VERSION, Heartbeat, ModelCard, decode

__all__ = ["PATIENCE_S", "await_events", "away", "card", "heartbeat"]

PATIENCE_S = 30


def card(**fields: Any) -> ModelCard:
    facts: dict[str, Any] = {
        "model": "tiny",
        "hash": "h1",
        "protocol": PROTOCOL_VERSION,
        "context_length": 2048,
        "vocab_size": 256,
        "eos_ids": (0,),
        "bos_id": None,
        "add_bos": False,
        "tokenizer": "{}",
        "chat_template": "",
        "capabilities": ("chat",),
        "price_class": "tiny",
        "created_ms": 0,
    }
    return ModelCard(**(facts | fields))


def heartbeat(**fields: Any) -> Heartbeat:
    facts: dict[str, Any] = {
        "engine": "e1", "pool": "tiny", "model": "tiny", "card_hash": "h1", "backend": "simulated", "state": "ready",
        "pid": 1, "at_ms": 0, "started_ms": 0, "steps": 10, "running": 1, "waiting": 0, "parked": 0,
        "kv_blocks": 100, "kv_free": 40, "kv_cached": 10, "block_size": 16, "tokens_per_s": 42.0,
        "prefill_tokens_per_s": 0.0, "step_s": 0.02, "by_tier": {"batch": 1},
    }  # fmt: skip
    return Heartbeat(**(facts | fields))


@contextmanager
def away(postgres_url: str) -> Iterator[None]:
    """The test database throws everybody out and lets nobody in."""
    name = connection.settings_dict["NAME"]
    connection.close()
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(postgres_url, dbname="postgres", autocommit=True) as server:
        server.execute(allow.format(sql.Identifier(name), sql.Literal(False)))
        server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            server.execute(allow.format(sql.Identifier(name), sql.Literal(True)))


def await_events(redis: Redis, keys: Keys, kind: Kind, count: int) -> list[Event]:
    """The first `count` events of a kind; waits for each."""
    found: list[Event] = []
    cursor, deadline = "0", time.monotonic() + PATIENCE_S
    client: Any = redis
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} {kind} events"
        reply = client.xread({keys.events: cursor}, block=1000) or {}
        for _, entries in reply.items() if isinstance(reply, dict) else reply:
            for entry_id, fields in entries:
                cursor = entry_id
                found += [e for e in decode(fields[b"e"], list[Event]) if e.kind == kind]
    return found
