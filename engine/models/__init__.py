"""Model architectures, one a file, and the loaders that read their weights from GGUF files and safetensors folders.

It must not know sequences, steps, scheduling or the wire: a model is a function from packed tokens to logits.
"""

from typing import TYPE_CHECKING, Any

from engine.models.checkpoint import Checkpoint, ModelError, TextAssets

if TYPE_CHECKING:
    from engine.models.loading import open_checkpoint

__all__ = ["Checkpoint", "ModelError", "TextAssets", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    """The loaders bring torch; the model store (`python -m engine.models`) goes without."""
    if name == "open_checkpoint":
        from engine.models.loading import open_checkpoint

        return open_checkpoint
    raise AttributeError(name)
