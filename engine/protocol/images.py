"""What the first bytes of an image say: its kind and its size, read without decoding anything.

A gateway looks before it admits an image and an engine before it decodes one, so what would unfold into gigabytes is
refused for the price of a few bytes. Whether the rest is sound shows only when it is decoded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

__all__ = [
    "FORMATS",
    "MAX_IMAGES",
    "MAX_IMAGES_BYTES",
    "MAX_IMAGE_BYTES",
    "MAX_PIXELS",
    "ImageError",
    "ImageFacts",
    "inspect",
]

MAX_IMAGES: Final = 64
"""In one request."""
MAX_IMAGE_BYTES: Final = 4 << 20
MAX_IMAGES_BYTES: Final = 8 << 20
"""Of one image and of all images of a request, encoded: they wait in Redis until the request has ended."""
MAX_PIXELS: Final = 25_000_000
"""Decoded, an image of this size takes 100 MB."""
MAX_ASPECT: Final = 100
"""The longer side over the shorter one. A model that keeps the aspect would enlarge a longer strip into gigabytes."""
MAX_SCANS: Final = 64
"""Passes of a progressive JPEG. Encoders make about ten; each costs the time of a whole image, however short it is."""

FORMATS: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""The formats that are read, and the media type of each."""

_SEGMENTS: Final = 1000
"""Before a JPEG's frame header; photographs have up to a hundred."""
_NO_SIZE: Final = frozenset({0xC4, 0xC8, 0xCC})
"""Among JPEG's markers 0xC0 to 0xCF, those that don't begin a frame."""


class ImageError(ValueError):
    """An image can't be used; the message says why, for whoever sent it."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """`format` is a key of `FORMATS`; the size is in pixels, before any rotation that the image asks for."""

    format: str
    width: int
    height: int


def inspect(data: bytes) -> ImageFacts:
    """The kind and size of an image within the limits above. Raises `ImageError`."""
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(f"an image has at most {MAX_IMAGE_BYTES >> 20} MiB, not {len(data)} bytes")
    facts = _facts(data)
    width, height = facts.width, facts.height
    if not width or not height:
        raise ImageError(f"the {facts.format} has no size")
    if width * height > MAX_PIXELS:
        raise ImageError(f"an image has at most {MAX_PIXELS // 1_000_000} million pixels, not {width} x {height}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"one side of an image is at most {MAX_ASPECT} times the other, not {width} x {height}")
    return facts


def _facts(data: bytes) -> ImageFacts:
    try:
        if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
            return ImageFacts("PNG", *struct.unpack_from(">II", data, 16))
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return ImageFacts("GIF", *struct.unpack_from("<HH", data, 6))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return ImageFacts("WEBP", *_webp_size(data))
        if data[:3] == b"\xff\xd8\xff":
            return ImageFacts("JPEG", *_jpeg_size(data))
    except (struct.error, IndexError):
        raise ImageError("the image is cut off") from None
    raise ImageError("it is no PNG, JPEG, WebP or GIF")


def _webp_size(data: bytes) -> tuple[int, int]:
    """RFC 9649: the canvas of an extended file, or the size of the only frame."""
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(_exactly(data, 27, 3), "little")
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError("the WebP does not begin with an image")


def _exactly(data: bytes, start: int, count: int) -> bytes:
    part = data[start : start + count]
    if len(part) < count:
        raise IndexError
    return part


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """ITU-T T.81: segments up to the frame header. In a picture's data 0xFF is escaped, so scans can be counted."""
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise ImageError(f"the JPEG has more than {MAX_SCANS} scans")
    at = 2
    for _ in range(_SEGMENTS):
        marker = data[at + 1]
        if data[at] != 0xFF:
            break
        if marker == 0xFF:  # filling
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        if marker in (0xD9, 0xDA):
            break
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    raise ImageError("the JPEG has no frame header")
