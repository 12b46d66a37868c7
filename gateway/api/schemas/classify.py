"""`POST /v1/classify`: one image or several, as data URLs."""

from __future__ import annotations

import binascii
import re
from typing import Annotated

from msgspec import Meta, Struct

from engine.protocol.images import FORMATS, MAX_IMAGES, MAX_IMAGES_BYTES, ImageError, inspect
from gateway.api.schemas.common import invalid

__all__ = ["MAX_BODY_BYTES", "ClassifyRequest"]

MAX_BODY_BYTES = MAX_IMAGES_BYTES * 4 // 3 + 65_536
"""Of a request on this route: the images in base64, and what stands around them."""
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]+)*)(;base64)?,", re.ASCII)
_KINDS = " or ".join(FORMATS.values())


class ClassifyRequest(Struct, kw_only=True):
    """Null means absent. Unknown fields are tolerated: clients run ahead."""

    model: str
    input: str | list[str]
    top_k: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    # Extensions of ours.
    service_tier: str | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None

    def check(self) -> None:
        """Rules between fields."""
        if isinstance(self.input, list) and not 0 < len(self.input) <= MAX_IMAGES:
            raise invalid("input", f"'input' holds 1 to {MAX_IMAGES} images, not {len(self.input)}.")

    def images(self) -> tuple[bytes, ...]:
        """The encoded images, of known kinds and sizes. Takes milliseconds a megabyte."""
        given = [self.input] if isinstance(self.input, str) else self.input
        images = tuple(_image(url, f"'input[{i}]'" if len(given) > 1 else "'input'") for i, url in enumerate(given))
        total = sum(len(image) for image in images)
        if total > MAX_IMAGES_BYTES:
            raise invalid("input", f"'input' holds at most {MAX_IMAGES_BYTES >> 20} MiB in all, not {total} bytes.")
        return images


def _image(url: str, where: str) -> bytes:
    """What a data URL holds (RFC 2397). Nothing is ever fetched: a server that does can be sent anywhere."""
    head = _DATA_URL.match(url[:256])
    if head is None:
        raise invalid("input", f"{where} is not a data URL; write 'data:image/png;base64,' and the image in base64.")
    if head[1] not in FORMATS.values():
        raise invalid("input", f"{where} has the media type '{head[1] or 'text/plain'}'; send {_KINDS}.")
    if not head[3]:
        raise invalid("input", f"{where} is not in base64; write ';base64' before the comma.")
    try:
        image = binascii.a2b_base64(url[head.end() :], strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise invalid("input", f"{where} is not valid base64: {str(error)[:100]}.") from None
    try:
        facts = inspect(image)
    except ImageError as error:
        raise invalid("input", f"{where} can't be used: {error}.") from None
    if FORMATS[facts.format] != head[1]:
        raise invalid("input", f"{where} says that it is {head[1]} but holds {FORMATS[facts.format]}.")
    return image
