#!/usr/bin/env python3
"""Stands in for the `llama-server` binary in llama.cpp's own server tests: starts the real one on a model that is here.

Their fixtures name models of a hub; each becomes `LLAMA_MODEL` (a GGUF). All other flags go through as they are.
`LLAMA_SERVER` is the real binary.
"""

from __future__ import annotations

import os
import sys

_FETCHED = {"--hf-repo", "--hf-file", "--model", "--model-url", "--mmproj-url"}


def here(arguments: list[str], model: str) -> list[str]:
    """The flags with every model to fetch replaced by one on disk."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word in _FETCHED:
            next(rest, None)
        else:
            kept.append(word)
    return ["--model", model, *kept]


if __name__ == "__main__":
    server = os.environ["LLAMA_SERVER"]
    os.execv(server, [server, *here(sys.argv[1:], os.environ["LLAMA_MODEL"])])  # noqa: S606
