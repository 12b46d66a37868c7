"""What runs on a data folder: processes from the supervisor's state, engines and queues from Redis. Also: stop it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from gateway.local.folder import DataFolder

__all__ = ["collect", "render", "stop_supervisor"]

_ENGINE_FIELDS = (
    *("engine", "pool", "backend", "state", "pid", "running", "waiting", "parked", "kv_blocks", "kv_free"),
    *("kv_cached", "kv_unwritten", "block_size", "tokens_per_s", "threads", "device", "dtype", "shadow"),
)


def collect(folder: DataFolder) -> dict[str, Any]:
    """One JSON-able object. `state`: running, degraded (a process or Redis is down), starting, stopping, stopped."""
    if not folder.locked():
        return {"state": "stopped", "data_dir": str(folder.path), "processes": [], "engines": [], "queues": {}}
    found = folder.read(folder.state)
    processes: list[dict[str, Any]] = found.get("processes", [])
    for process in processes:
        if process["pid"] is not None and not _exists(process["pid"]):
            process["state"], process["pid"] = "ended", None
    report = {
        "state": _state(found, processes),
        "data_dir": str(folder.path),
        "supervisor": found.get("supervisor"),
        "started_ms": found.get("started_ms"),
        "api": found.get("api"),
        "console": found.get("console"),
        "processes": processes,
    }
    try:
        report |= _from_redis(folder.read(folder.environment))
    except Exception as error:  # a status that fails because Redis does would hide the reason
        report |= {"engines": None, "queues": None, "redis_error": str(error)}
        report["state"] = "degraded" if report["state"] == "running" else report["state"]
    return report


def _state(found: dict[str, Any], processes: list[dict[str, Any]]) -> str:
    if found.get("stopping"):
        return "stopping"
    if not found.get("ready"):
        return "starting"
    return "running" if all(p["state"] == "running" for p in processes) else "degraded"


def _from_redis(environment: dict[str, str]) -> dict[str, Any]:
    """Latest heartbeats and queue depths by pool and tier; an address in our own environment wins."""
    import redis

    from engine.protocol.keys import DEFAULT_PREFIX, Keys
    from engine.protocol.messages import Heartbeat, decode

    url = os.environ.get("REDIS_URL") or environment.get("REDIS_URL", "")
    if not url:
        return {"engines": [], "queues": {}}
    keys = Keys(os.environ.get("SLUICE_REDIS_PREFIX") or environment.get("SLUICE_REDIS_PREFIX") or DEFAULT_PREFIX)
    now_ms = int(time.time() * 1000)
    engines: list[dict[str, Any]] = []
    queues: dict[str, dict[str, int]] = {}
    with redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as client:
        for pool in sorted(name.decode() for name in client.hkeys(keys.pools)):
            depths = client.hgetall(keys.depth(pool))
            queues[pool] = {field.decode(): int(n) for field, n in depths.items() if b":" not in field}
            for engine in client.zrange(keys.engines(pool), 0, -1):
                raw = client.get(keys.engine(engine.decode()))
                if raw is not None:
                    engines.append(_engine(decode(raw, Heartbeat), now_ms))
    return {"engines": engines, "queues": queues}


def _engine(beat: Any, now_ms: int) -> dict[str, Any]:
    return {name: getattr(beat, name) for name in _ENGINE_FIELDS} | {"age_ms": now_ms - beat.at_ms}


def render(report: dict[str, Any]) -> str:
    """For a person."""
    lines = [f"{report['state']}  {report['data_dir']}"]
    if report["state"] == "stopped":
        return lines[0]
    lines += [
        f"  api      {report['api']}",
        f"  console  {report['console']}",
        "",
        *_process_lines(report["processes"]),
    ]
    if report.get("redis_error"):
        lines += ["", f"  redis does not answer: {report['redis_error']}"]
    for engine in report.get("engines") or []:
        lines.append(
            f"  engine {engine['engine']} ({engine['pool']}, {engine['backend']}, {engine['threads']} threads): "
            f"{engine['state']}, {engine['running']} running, {engine['kv_free']}/{engine['kv_blocks']} blocks free, "
            f"heartbeat {engine['age_ms']} ms ago"
        )
    for pool, depths in (report.get("queues") or {}).items():
        lines.append(f"  queue {pool}: " + (", ".join(f"{tier} {n}" for tier, n in sorted(depths.items())) or "empty"))
    return "\n".join(lines)


def _process_lines(processes: list[dict[str, Any]]) -> Iterator[str]:
    for process in processes:
        restarts = f"  restarted {process['restarts']}x" if process["restarts"] else ""
        yield f"  {process['name']:<12} {process['state']:<11} {process['pid'] or '-':>8}{restarts}"
    yield ""


def stop_supervisor(folder: DataFolder, timeout_s: float) -> tuple[bool, str]:
    """SIGTERM to the supervisor and wait until it has let the folder go."""
    if not folder.locked():
        return True, f"nothing runs on {folder.path}."
    pid = folder.read(folder.state).get("supervisor")
    if not isinstance(pid, int) or not _exists(pid):
        return (
            False,
            f"something holds {folder.path} but its state.json names no running process; find and stop it by hand.",
        )
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        return False, f"process {pid} belongs to another user; stop it as that user."
    deadline = time.monotonic() + timeout_s
    while folder.locked():
        if time.monotonic() > deadline:
            return False, f"process {pid} is still stopping after {timeout_s:.0f} s."
        time.sleep(0.1)
    return True, "stopped."


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
