"""Image classification on torch: one-shot work, images of one size side by side in a step, no KV."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import tokenizers
import torch
from torch import Tensor

from engine.backends.contract import Capacity, SequenceInput
from engine.backends.decoder import Decoder, Seen
from engine.backends.one_shot import DTYPES, OneShot, dtype_of
from engine.models.checkpoint import ModelError
from engine.models.image_folder import ImageCheckpoint, Preprocessing
from engine.models.loading import open_classifier
from engine.models.resnet import ResNet
from engine.models.vit import ViT
from engine.protocol.messages import PROTOCOL_VERSION, ModelCard

__all__ = ["ImageClassifier", "create"]

_CLASSES: dict[str, type[ViT] | type[ResNet]] = {
    "ViTForImageClassification": ViT,
    "ResNetForImageClassification": ResNet,
}
_STEP_TOKENS = 2048
_WAITING_IMAGES = 64
"""Images that may wait in the engine: up to 4 MiB each as they were sent. What is not pulled can go to another one."""
_PREPARING = 16
"""Of those, being decoded or waiting for it. Few, so that who comes later but is in more of a hurry waits little."""


class Classifier(Protocol):
    """A model of images. `tokens` is what one image costs."""

    tokens: int

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Float32 logits [images, classes] of normalised images."""
        ...


class ImageClassifier(OneShot[bytes, Classifier]):
    """An image model behind the backend contract. A slice is a whole image and ends it; its scores are in `extras`."""

    def __init__(self, model: Classifier, checkpoint: ImageCheckpoint, card: ModelCard, capacity: Capacity) -> None:
        super().__init__(model, card, capacity, threads=torch.get_num_threads(), fingerprint=card.hash)
        self._many = checkpoint.many
        self._size = checkpoint.preprocessing
        self._decoder = Decoder(_settings(self._size), max(1, min(4, (os.cpu_count() or 1) // 4)))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        threads: int,
        dtype: str = "auto",
        model: str = "",
        context_length: int = 0,
        max_rows: int = 64,
        max_step_tokens: int = _STEP_TOKENS,
        price_class: str = "",
    ) -> ImageClassifier:
        """Read a Hugging Face folder. Raises `ModelError` when it can't be used.

        There is no context to choose.
        """
        checkpoint = open_classifier(path)
        if context_length:
            raise ModelError(f"{path}: an image model has no context length to set")
        torch.set_num_threads(threads)
        dtype = dtype_of(dtype)
        built: Classifier = _CLASSES[str(checkpoint.architecture)](checkpoint, DTYPES[dtype])
        name = model or Path(path).name.lower()
        capacity = Capacity(
            block_size=16,
            device_blocks=-(-_WAITING_IMAGES * built.tokens // 16),
            host_blocks=0,
            max_rows=max_rows,
            max_step_tokens=max(max_step_tokens, built.tokens),
            context_length=built.tokens,
            max_preparing=_PREPARING,
        )
        return cls(built, checkpoint, _card(checkpoint, built, name, price_class or name), capacity)

    def look(self, images: tuple[bytes, ...], rank: int, done: Seen, wanted: Callable[[], bool]) -> None:
        self._decoder.decode(images, rank, done, wanted)

    def add(self, sequence: SequenceInput) -> None:
        """Raises ValueError when the pixels are not those of an image of the model's size."""
        if len(sequence.pixels) != self._size.height * self._size.width * 3:
            raise ValueError(f"the image is not {self._size.width} x {self._size.height} pixels")
        self._inputs[sequence.sequence] = sequence.pixels

    def _rows(self, model: Classifier, inputs: list[bytes]) -> Tensor:
        """The scores of all classes [images, classes]; they sum to 1 unless classes don't exclude each other."""
        logits_BK = model.forward(self._normalised(inputs))
        return logits_BK.sigmoid() if self._many else logits_BK.softmax(1)

    def _normalised(self, images: list[bytes]) -> Tensor:
        size = self._size
        packed = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
        pixels_BHWC = packed.view(len(images), size.height, size.width, 3).float() * size.factor
        pixels_BHWC = (pixels_BHWC - torch.tensor(size.mean)) / torch.tensor(size.std)
        return pixels_BHWC.permute(0, 3, 1, 2).contiguous()

    def close(self) -> None:
        self._decoder.close()
        super().close()


def _settings(size: Preprocessing) -> dict[str, int]:
    return {"height": size.height, "width": size.width, "shortest": size.shortest, "resample": size.resample}


def _card(checkpoint: ImageCheckpoint, model: Classifier, name: str, price_class: str) -> ModelCard:
    """Two engines with the same weights, classes and preprocessing publish the same hash. It has no text."""
    identity = f"{PROTOCOL_VERSION} {name} {model.tokens} {checkpoint.content_hash()}"
    return ModelCard(
        model=name,
        hash=hashlib.sha256(identity.encode()).hexdigest()[:32],
        protocol=PROTOCOL_VERSION,
        context_length=model.tokens,
        vocab_size=0,
        eos_ids=(),
        bos_id=None,
        add_bos=False,
        tokenizer=tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(),
        chat_template="",
        capabilities=("image",),
        price_class=price_class,
        created_ms=int(time.time() * 1000),
        backend="image",
        image_tokens=model.tokens,
        labels=checkpoint.labels,
    )


create = ImageClassifier.load
"""What the registry calls."""
