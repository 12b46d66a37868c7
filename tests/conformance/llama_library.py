#!/usr/bin/env python3
"""Stands in for the `llama-server` binary where it is not built: llama.cpp's server as the package `xllamacpp` has it.

The same server code with the flags that llama.cpp's own tests pass; one that isn't known here is refused loudly.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xllamacpp

Setter = Callable[[Any, str], None]


def _into(path: str, kind: Callable[[str], Any] = int) -> Setter:
    """Set a field, `sampling.seed` of the sampling options."""
    *groups, name = path.split(".")

    def put(params: Any, value: str) -> None:
        for group in groups:
            params = getattr(params, group)
        setattr(params, name, kind(value))

    return put


def _reasoning(params: Any, value: str) -> None:
    params.enable_reasoning = {"on": 1, "off": 0, "auto": -1}[value]
    if value != "auto":
        params.default_template_kwargs = {"enable_thinking": str(value == "on").lower()}


def _reranking(params: Any, _: str) -> None:
    params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK


def _listed(text: str) -> list[str]:
    return [text]


def _set(text: str) -> set[str]:
    return set(text.split(","))


def _flash(text: str) -> Any:
    names = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
    return xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{names[text]}"]


VALUES: dict[str, Setter] = {
    "--port": _into("port"),
    "--host": _into("hostnames", lambda text: text.split(",")),
    "--temp": _into("sampling.temp", float),
    "--seed": _into("sampling.seed"),
    "--model": _into("model.path", str),
    "--batch-size": _into("n_batch"),
    "--ubatch-size": _into("n_ubatch"),
    "--threads": _into("cpuparams.n_threads"),
    "--pooling": _into("pooling_type", lambda text: xllamacpp.llama_pooling_type[f"LLAMA_POOLING_TYPE_{text.upper()}"]),
    "--alias": _into("model_alias", _set),
    "--tags": _into("model_tags", _set),
    "--ctx-size": _into("n_ctx"),
    "--parallel": _into("n_parallel"),
    "-fa": _into("flash_attn_type", _flash),
    "--n-predict": _into("n_predict"),
    "--api-key": _into("api_keys", _listed),
    "--chat-template": _into("chat_template", str),
    "--chat-template-file": _into("chat_template", lambda file: Path(file).read_text()),
    "--reasoning": _reasoning,
    "--reasoning-format": _into(
        "reasoning_format", lambda text: xllamacpp.common_reasoning_format[f"COMMON_REASONING_FORMAT_{text.upper()}"]
    ),
    "--cors-origins": _into("cors_origins", str),
    "--media-path": _into("media_path", lambda text: text.rstrip("/") + "/"),
    "--tools": _into("server_tools", _listed),
    "--cache-ram": _into("cache_ram_mib"),
}
SWITCHES: dict[str, Setter] = {
    "--offline": _into("offline", bool),
    "--cont-batching": _into("cont_batching", bool),
    "--embedding": _into("embedding", bool),
    "--reranking": _reranking,
    "--kv-unified": _into("kv_unified", bool),
    "--slots": _into("endpoint_slots", bool),
    "--no-slots": _into("endpoint_slots", lambda _: False),
    "--verbose": _into("verbosity", lambda _: 9),
    "--context-shift": _into("ctx_shift", bool),
    "--no-ui": _into("ui", lambda _: False),
    "--jinja": _into("use_jinja", bool),
    "--no-jinja": _into("use_jinja", lambda _: False),
    "--no-mmproj": lambda params, _: None,
    "--ui-mcp-proxy": _into("ui_mcp_proxy", bool),
}


def parameters(arguments: list[str]) -> Any:
    """What `llama-server` makes of these flags. Raises KeyError for one that isn't known."""
    params = xllamacpp.CommonParams()
    params.warmup = False  # a server lives for one test
    words: Iterator[str] = iter(arguments)
    for flag in words:
        if flag in SWITCHES:
            SWITCHES[flag](params, flag)
        else:
            VALUES[flag](params, next(words))
    return params


if __name__ == "__main__":
    server = xllamacpp.Server(parameters(sys.argv[1:]))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
