"""From a path to an opened checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.models.checkpoint import Checkpoint, ModelError

if TYPE_CHECKING:
    from engine.models.encoder_folder import EncoderCheckpoint
    from engine.models.image_folder import ImageCheckpoint

__all__ = ["open_checkpoint", "open_classifier", "open_encoder"]


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


def open_encoder(path: str | Path) -> EncoderCheckpoint:
    """Open a folder with an embedding model. Raises `ModelError` with the reason when it can't be used."""
    from engine.models.encoder_folder import EncoderCheckpoint

    path = Path(path)
    if not path.is_dir():
        raise ModelError(f"{path}: an embedding model is a folder with config.json, tokenizer.json and safetensors")
    try:
        return EncoderCheckpoint(path)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error


def open_classifier(path: str | Path) -> ImageCheckpoint:
    """Open a folder with an image classifier. Raises `ModelError` with the reason when it can't be used."""
    from engine.models.image_folder import ImageCheckpoint

    path = Path(path)
    if not path.is_dir():
        files = "config.json, preprocessor_config.json and safetensors"
        raise ModelError(f"{path}: an image model is a folder with {files}")
    try:
        return ImageCheckpoint(path)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
