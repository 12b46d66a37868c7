"""The command line of an engine. Everything may also stand in the environment where that is named."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol.keys import DEFAULT_PREFIX
from engine.scheduler import POLICIES

__all__ = ["Options", "parse"]

_EPILOG = """examples:
  python -m engine.serve --pool smollm2-135m --model var/models/smollm2-135m.gguf --redis-url redis://127.0.0.1:6379/0
  python -m engine.serve --pool all-minilm-l6-v2 --backend embedding --model var/models/all-minilm-l6-v2
  python -m engine.serve --pool vit-base --backend image --model /path/to/vit-base-patch16-224
  python -m engine.serve --pool demo --backend simulated --simulate decode_tps=40,prefill_tps=4000,tokens=64

exit status: 0 after a drain, 2 for a wrong command line, 3 when the pool serves another model card,
             70 after a fault of the backend (start it again), 1 for anything else
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What one engine process was told."""

    pool: str
    engine: str
    backend: str
    model: str
    model_name: str
    redis_url: str
    prefix: str
    threads: int
    policy: str
    dtype: str
    quantization: str
    drain_s: float
    lease_ms: int
    simulate: str
    max_rows: int
    max_step_tokens: int
    kv_memory_mib: int
    host_memory_mib: int
    context: int
    batch_window_ms: float
    prefix_cache: bool
    whole_prefill: bool
    preempt: bool
    express_rows: int
    record: str
    record_mib: int
    shadow: tuple[str, ...]
    shadow_every: int
    shadow_cap_ms: float
    log_level: str


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m engine.serve",
        description="Serve one model from a pool's queue: pull requests from Redis, compute, push tokens back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env = os.environ.get
    add = p.add_argument
    add("--pool", required=True, help="queue to serve; all engines of a pool serve the same model card")
    add(
        "--id",
        default="",
        help="name of this engine, unique in the cell (default: host, pid and a random part)",
    )
    add(
        "--backend",
        choices=("causal_lm", "embedding", "image", "simulated"),
        default="causal_lm",
        help="what computes (default: %(default)s)",
    )
    add("--model", default="", help="GGUF file or Hugging Face folder; not for the simulated backend")
    add("--model-name", default="", help="the model's name for clients (default: the pool's)")
    add("--redis-url", default=env("REDIS_URL", ""), help="redis:// or unix:// address (environment: REDIS_URL)")
    add(
        "--prefix",
        default=env("SLUICE_REDIS_PREFIX", DEFAULT_PREFIX),
        help="prefix of every key (environment: SLUICE_REDIS_PREFIX; default: %(default)s)",
    )
    add("--threads", type=int, default=0, help="compute threads (default: cores - 1, at least 1)")
    add(
        "--policy",
        choices=sorted(POLICIES),
        default="tiered",
        help="scheduling policy (default: %(default)s)",
    )
    add("--dtype", default="auto", help="auto, fp32, bf16 (default: %(default)s)")
    add(
        "--quantization",
        choices=("none", "int8"),
        default="none",
        help="int8: weights and activations in 8 bits, on CPUs (default: %(default)s)",
    )
    add("--max-rows", type=int, default=0, help="sequences in one step (default: the backend's)")
    add("--max-step-tokens", type=int, default=0, help="tokens in one step (default: the backend's)")
    add("--kv-memory-mib", type=int, default=1024, help="memory for KV blocks on the device (default: %(default)s)")
    add("--host-memory-mib", type=int, default=512, help="host memory for parked KV blocks (default: %(default)s)")
    add("--context", type=int, default=0, help="longest context to serve (default: the model's)")
    add(
        "--batch-window-ms",
        type=float,
        default=0.0,
        help="embeddings and images: how long the first of a step may wait for company; less when a deadline or a full "
        "step comes first, and not at all when none is to be expected (default: %(default)s)",
    )
    add("--no-prefix-cache", action="store_true", help="compute every prompt anew (to compare)")
    add("--whole-prefill", action="store_true", help="never split a prompt over several steps (to compare)")
    add("--express-rows", type=int, default=-1, help="most rows kept for light tenants, whose requests ask for no more "
        "rows than an equal share (default: the scheduler's, 2 of every 8)")  # fmt: skip
    add("--no-preemption", action="store_true", help="never evict running work for a better tier (to compare)")
    _add_watching(p)
    add(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="after SIGTERM, let requests go on so long (default: %(default)s)",
    )
    add(
        "--lease-ms",
        type=int,
        default=2000,
        help="silence after which it counts as lost (default: %(default)s)",
    )
    add(
        "--simulate",
        default="",
        metavar="KEY=VALUE,…",
        help="simulated backend: decode_tps, prefill_tps (0: no delay), text=words|echo|TEXT, tokens, rows, "
        "step_tokens, kv_tokens, context, fail_after, crash_after, stall_after, stall_s, on=TEXT (only such prompts)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: %(default)s")
    return p


def _add_watching(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("watching the scheduler")
    add = group.add_argument
    add(
        "--record",
        default="",
        metavar="FILE",
        help="write all that the scheduler is told and decides, without any token, for `sluice replay`; {engine} in "
        "the name stands for the engine's; an older file becomes FILE.1",
    )
    add("--record-mib", type=int, default=256, help="size at which the recording stops (default: %(default)s)")
    add(
        "--shadow",
        default="",
        metavar="POLICY[,POLICY]",
        help="let other policies plan on the same view and count where they differ; nothing they decide is carried out",
    )
    add("--shadow-every", type=int, default=50, metavar="K", help="in every K-th step (default: %(default)s)")
    add("--shadow-cap-ms", type=float, default=2.0, metavar="MS", help="for at most so long (default: %(default)s)")


def _shadow(parser: argparse.ArgumentParser, names: str) -> tuple[str, ...]:
    policies = tuple(dict.fromkeys(filter(None, names.split(","))))
    if unknown := sorted(set(policies) - set(POLICIES)):
        parser.error(f"--shadow: unknown policy {unknown[0]}; known are {', '.join(sorted(POLICIES))}")
    return policies


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Exits with status 2 and a sentence when it is wrong."""
    parser = _parser()
    a = parser.parse_args(arguments)
    if not a.redis_url:
        parser.error("no Redis address: give --redis-url or set REDIS_URL")
    if a.backend != "simulated" and not a.model:
        parser.error(f"the {a.backend} backend needs --model")
    if a.quantization != "none" and a.backend != "causal_lm":
        parser.error(f"--quantization is for causal_lm, not for the {a.backend} backend")
    if a.lease_ms < 500:
        parser.error("--lease-ms must be at least 500: the engine renews it four times a second")
    not_negative = (a.threads, a.max_rows, a.max_step_tokens, a.context, a.host_memory_mib, a.drain_seconds)
    if min(*not_negative, a.batch_window_ms) < 0 or a.kv_memory_mib < 1:
        parser.error("sizes, counts and seconds can't be negative, and KV blocks need at least 1 MiB")
    if min(a.record_mib, a.shadow_every, a.shadow_cap_ms) <= 0:
        parser.error("--record-mib, --shadow-every and --shadow-cap-ms must be more than 0")
    engine = a.id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return Options(
        pool=a.pool,
        engine=engine,
        backend=a.backend,
        model=a.model,
        model_name=a.model_name or a.pool,
        redis_url=a.redis_url,
        prefix=a.prefix,
        threads=a.threads or max(1, (os.cpu_count() or 2) - 1),
        policy=a.policy,
        dtype=a.dtype,
        quantization=a.quantization,
        drain_s=a.drain_seconds,
        lease_ms=a.lease_ms,
        simulate=a.simulate,
        max_rows=a.max_rows,
        max_step_tokens=a.max_step_tokens,
        kv_memory_mib=a.kv_memory_mib,
        host_memory_mib=a.host_memory_mib,
        context=a.context,
        batch_window_ms=a.batch_window_ms,
        prefix_cache=not a.no_prefix_cache,
        whole_prefill=a.whole_prefill,
        preempt=not a.no_preemption,
        express_rows=a.express_rows,
        record=a.record.replace("{engine}", engine),
        record_mib=a.record_mib,
        shadow=_shadow(parser, a.shadow),
        shadow_every=a.shadow_every,
        shadow_cap_ms=a.shadow_cap_ms,
        log_level=a.log_level,
    )
