"""From a path to an opened checkpoint."""

from __future__ import annotations

from pathlib import Path

from engine.models.checkpoint import Checkpoint, ModelError

__all__ = ["open_checkpoint"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder. Raises `ModelError` with the reason when it can't be used."""
    from engine.models.gguf_file import GGUFCheckpoint
    from engine.models.hf_folder import FolderCheckpoint

    path = Path(path)
    try:
        if path.is_dir():
            return FolderCheckpoint(path)
        if not path.exists():
            raise ModelError(f"{path}: there is no such file")
        return GGUFCheckpoint(path)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
