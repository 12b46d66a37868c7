"""From an encoded image to the pixels that a model takes, and the process in which that is done for strangers.

`python -m engine.backends.pixels JSON` reads frames of a length (4 bytes, big-endian) and an image, and answers each
with a byte (0: pixels follow, 1: the reason against it follows) and a frame of that. Imports no torch: it is small.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile
from PIL.Image import Resampling, Transpose

from engine.protocol.images import FORMATS, MAX_PIXELS, ImageError, inspect

__all__ = ["CPU_SECONDS", "MEMORY_BYTES", "pixels"]

CPU_SECONDS = 5
MEMORY_BYTES = 640 << 20
"""What one image may take, beside what the process already holds. Enforced by the kernel. The largest that is let in
takes about half of either."""
_ORIENTATION = 0x0112
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""EXIF's orientations, and how each is undone."""


def pixels(data: bytes, *, height: int, width: int, shortest: int, resample: int) -> bytes:
    """RGB bytes [height, width, 3] of a PNG, JPEG, WebP or GIF (its first frame), upright, what is transparent white.

    `shortest`: see `Preprocessing`. Raises `ImageError` with the reason for whoever sent it.
    """
    facts = inspect(data)
    try:
        with Image.open(io.BytesIO(data), formats=(facts.format,)) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise ImageError(f"an image has at most {MAX_PIXELS // 1_000_000} million pixels")
            image = _upright(_over_white(opened), opened)
    except ImageError:
        raise
    except MemoryError:
        raise ImageError(f"it takes more than {MEMORY_BYTES >> 20} MiB to decode") from None
    except Exception as error:  # decoders raise whatever a broken file makes them raise
        raise ImageError(f"the {facts.format} can't be decoded: {str(error)[:100] or type(error).__name__}") from None
    return _fitted(image, height, width, shortest, Resampling(resample)).tobytes()


def _over_white(image: ImageFile.ImageFile) -> Image.Image:
    image.load()
    if image.mode.startswith("I"):  # 16 bits of grey: the upper 8 are what the eye sees
        return image.convert("I").point([min(255, value >> 8) for value in range(65536)], "L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGB", layered.size, (255, 255, 255))
    white.paste(layered, mask=layered.getchannel("A"))
    return white


def _upright(image: Image.Image, opened: Image.Image) -> Image.Image:
    turn = None
    with contextlib.suppress(Exception):  # broken metadata says nothing, which is no fault of the picture
        turn = _TURNS.get(opened.getexif().get(_ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _fitted(image: Image.Image, height: int, width: int, shortest: int, resample: Resampling) -> Image.Image:
    if not shortest:
        return image.resize((width, height), resample)
    short, long = sorted(image.size)
    longer = int(shortest * long / short)
    size = (shortest, longer) if image.width <= image.height else (longer, shortest)
    image = image.resize(size, resample)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return image.crop((left, top, left + width, top + height))


def _serve(settings: dict[str, Any]) -> None:
    """Answer images until there are no more. The kernel ends the process when one takes too much."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # the library refuses what has more than twice as many
    warnings.simplefilter("ignore")
    Image.init()
    if missing := FORMATS.keys() - Image.OPEN.keys():
        raise SystemExit(f"this Pillow can't read {', '.join(sorted(missing))}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for ended_by in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # meant for the engine, which may still drain
        signal.signal(ended_by, signal.SIG_IGN)
    answers.write(b"\0")
    answers.flush()
    while len(head := requests.read(4)) == 4:
        data = requests.read(int.from_bytes(head, "big"))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = math.ceil(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, hard))  # SIGXCPU ends us
        try:
            status, answer = b"\0", pixels(data, **settings)
        except ImageError as error:
            status, answer = b"\1", str(error).encode()
        answers.write(status + len(answer).to_bytes(4, "big") + answer)
        answers.flush()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
