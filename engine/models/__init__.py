"""Model architectures, one a file, and the loaders that read their weights from GGUF files and safetensors folders.

It must not know sequences, steps, scheduling or the wire: a model is a function from packed tokens to logits.
"""

from engine.models.checkpoint import Checkpoint, ModelError, TextAssets
from engine.models.loading import open_checkpoint

__all__ = ["Checkpoint", "ModelError", "TextAssets", "open_checkpoint"]
