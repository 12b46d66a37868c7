"""`python -m engine.text.grammar.child CPU_SECONDS MEMORY_BYTES`: the process in which grammars are tried.

Reads a model card, then constraints, as lines of JSON; answers each with the reason against it, empty if there is none.
"""

from __future__ import annotations

import math
import resource
import sys
from pathlib import Path

import msgspec
import numpy as np

from engine.protocol.messages import ModelCard
from engine.text.grammar.constraint import ConstraintError
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer


def main(cpu_seconds: int, memory_bytes: int) -> None:
    lines = sys.stdin.buffer
    vocabulary = Vocabulary(Tokenizer(msgspec.json.decode(lines.readline(), type=ModelCard)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + memory_bytes, held + memory_bytes))
    _answer("")
    for line in lines:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = math.ceil(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, resource.RLIM_INFINITY))  # SIGXCPU ends us
        _answer(_reason(vocabulary, msgspec.json.decode(line, type=str)))


def _reason(vocabulary: Vocabulary, constraint: str) -> str:
    mask = np.zeros(vocabulary.words, np.int32)
    try:
        vocabulary.compile(constraint).fill(mask)
    except (ConstraintError, ValueError, RecursionError) as error:
        return str(error) or type(error).__name__
    return "" if mask.any() else "nothing satisfies it"


def _answer(text: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(text) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
