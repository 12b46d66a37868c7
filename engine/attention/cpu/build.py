"""Compiles a C++ source, once for each source, compiler and processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

__all__ = ["BuildError", "compiled"]

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")


class BuildError(Exception):
    """The kernels can't be compiled here; the reference kernels can be used instead."""


def compiled(source: Path, cache_dir: Path | None = None) -> ctypes.CDLL:
    """The library of a source file, compiled (in seconds) when the cache doesn't have it. Raises `BuildError`."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) is installed")
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / "kernels"
    library = folder / f"{source.stem}-{_identity(compiler, source)}.so"
    if not library.exists():
        _compile(compiler, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled kernels can't be loaded: {error}") from error


def _identity(compiler: str, source: Path) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (source.read_text(), *_FLAGS, version, platform.machine(), _processor_flags(), str(_openmp_runtime()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _openmp_runtime() -> Path | None:
    """The OpenMP library torch has loaded: a second one would bring a second pool of threads to the same cores."""
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((Path(line.split()[-1]) for line in lines if "libgomp" in line), None)


def _compile(compiler: str, source: Path, library: Path) -> None:
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            unit, result = Path(scratch) / "unit.o", Path(scratch) / "unit.so"
            _run([compiler, *_FLAGS, "-c", str(source), "-o", str(unit)])
            runtime = _openmp_runtime()
            _run([compiler, "-shared", str(unit), "-o", str(result), str(runtime) if runtime else "-fopenmp"])
            result.replace(library)  # whole or not at all, also when two engines start together
    except OSError as error:
        raise BuildError(f"{library.parent}: {error.strerror or error}") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"compiling failed: {done.stderr.strip()[-400:]}")
