"""The image backend: scores against a plain formulation and `transformers`, pictures of every kind, hostile ones."""

from __future__ import annotations

import gc
import io
import json
import struct
import sys
import time
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.backends import decoder
from engine.backends.contract import SequenceInput
from engine.backends.image import ImageClassifier
from engine.backends.pixels import pixels
from engine.models import ModelError
from engine.protocol.images import MAX_PIXELS, ImageError, inspect
from engine.protocol.messages import Sampling
from engine.scheduler import SchedulerConfig, create
from engine.scheduler.contract import Request
from tests.pictures import HEADS, HIDDEN, LABELS, LAYERS, PATCH, SIDE, TOKENS, WIDE, encoded, picture, vit_folder

SIZE = {"height": SIDE, "width": SIDE, "shortest": 0, "resample": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vit_folder(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[ImageClassifier]:
    made = ImageClassifier.load(folder, threads=1)
    yield made
    made.close()


def looked(backend: ImageClassifier, *images: bytes) -> tuple[tuple[bytes, ...], str, str]:
    told: SimpleQueue[tuple[tuple[bytes, ...], str, str]] = SimpleQueue()
    backend.look(images, 1, lambda *answer: told.put(answer), lambda: True)
    return told.get(timeout=60)


def test_images_nobody_waits_for_are_not_decoded(backend: ImageClassifier) -> None:
    told: list[object] = []
    backend.look((b"never looked at",) * 3, 0, lambda *answer: told.append(answer), lambda: False)
    assert looked(backend, b"no image")[1] == "invalid_image"  # of a worse tier, so it comes after them
    assert told == []


def classified(backend: ImageClassifier, *images: bytes, step_tokens: int = 0) -> list[list[float]]:
    """Scores by image, under the real scheduler."""
    capacity = backend.capacity
    tokens = step_tokens or capacity.max_step_tokens
    config = SchedulerConfig(
        block_size=capacity.block_size,
        device_blocks=capacity.device_blocks,
        max_rows=min(tokens, capacity.max_rows),
        max_step_tokens=tokens,
        context_length=capacity.context_length,
    )
    scheduler = create("tiered", config)
    seen, _, reason = looked(backend, *images)
    assert not reason
    cost = backend.card.image_tokens
    for n, found in enumerate(seen):
        scheduler.submit(Request(n, n, 1, "alpha", (0,) * cost, 0, 0.0, 10.0, 1.0, cost_tokens=cost), 0.0)
        backend.add(SequenceInput(n, (0,) * cost, cost, Sampling(max_tokens=0), 0, 0, found))
    scores: dict[int, list[float]] = {}
    while not scheduler.idle:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, backend.execute(plan), 0.0)
        scores |= backend.extras().vectors
    scheduler.check()
    return [scores[n] for n in range(len(images))]


def plain(folder: Path, image: Image.Image) -> Tensor:
    """The same model written down from the paper, one image at a time: patches by hand, torch's own encoder layers."""
    w = load_file(folder / "model.safetensors")
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    values = torch.tensor(list(small.tobytes()), dtype=torch.float64).view(SIDE, SIDE, 3) / 255
    values = (values - torch.tensor([0.5, 0.4, 0.6])) / torch.tensor([0.5, 0.25, 0.3])
    kernel = w["vit.embeddings.patch_embeddings.projection.weight"].double()
    rows = [w["vit.embeddings.cls_token"][0, 0].double()]
    for y in range(0, SIDE, PATCH):
        for x in range(0, SIDE, PATCH):
            patch = values[y : y + PATCH, x : x + PATCH].permute(2, 0, 1)
            rows.append((kernel * patch).sum((1, 2, 3)) + w["vit.embeddings.patch_embeddings.projection.bias"])
    hidden = (torch.stack(rows) + w["vit.embeddings.position_embeddings"][0])[None]
    for number in range(LAYERS):
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, WIDE, 0.0, "gelu", 1e-12, batch_first=True, norm_first=True, dtype=torch.float64
        ).eval()
        p = f"vit.encoder.layer.{number}."
        parts = [f"{p}attention.attention.{part}" for part in ("query", "key", "value")]
        state = {"self_attn.in_proj_weight": torch.cat([w[f"{part}.weight"] for part in parts])}
        state["self_attn.in_proj_bias"] = torch.cat([w[f"{part}.bias"] for part in parts])
        names = {"self_attn.out_proj": "attention.output.dense", "linear1": "intermediate.dense"}
        names |= {"linear2": "output.dense", "norm1": "layernorm_before", "norm2": "layernorm_after"}
        for theirs, ours in names.items():
            state |= {f"{theirs}.{kind}": w[f"{p}{ours}.{kind}"] for kind in ("weight", "bias")}
        layer.load_state_dict(state)
        hidden = layer(hidden)
    last = nn.functional.layer_norm(
        hidden[0, 0], (HIDDEN,), w["vit.layernorm.weight"].double(), w["vit.layernorm.bias"].double(), 1e-12
    )
    return (w["classifier.weight"].double() @ last + w["classifier.bias"]).softmax(0).detach()


def test_scores_are_those_of_the_plain_formulation(backend: ImageClassifier, folder: Path) -> None:
    images = [picture(60, 40, 1), picture(31, 90, 2), picture(32, 32, 3, "L"), picture(200, 150, 4)]
    found = torch.tensor(classified(backend, *(encoded(image) for image in images)), dtype=torch.float64)
    wanted = torch.stack([plain(folder, image) for image in images])
    assert (found - wanted).abs().max() < 1e-5
    assert wanted.max(0).values.min() - wanted.min() > 0.05, "the model tells them apart"


def test_who_shares_the_step_changes_no_more_than_rounding(backend: ImageClassifier) -> None:
    images = [encoded(picture(seed=seed)) for seed in range(1, 6)]
    together, one_by_one = classified(backend, *images), classified(backend, *images, step_tokens=TOKENS)
    assert [pytest.approx(scores, abs=1e-6) for scores in together] == one_by_one


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.parametrize("kind", ["vit", "bottleneck", "basic"])
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(1)
    model: Any
    processor: Any
    if kind == "vit":
        shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = ViTConfig(**shape, intermediate_size=64, image_size=32, patch_size=8, num_labels=5)
        model, processor = ViTForImageClassification(config), ViTImageProcessorPil(size={"height": 32, "width": 32})
    else:
        stages = {"hidden_sizes": [8, 32], "depths": [2, 2], "embedding_size": 8, "layer_type": kind}
        model = ResNetForImageClassification(ResNetConfig(**stages, num_labels=5))
        processor = ConvNextImageProcessorPil(size={"shortest_edge": 64})
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.eval().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    images = [picture(100, 60, 1), picture(33, 90, 2), picture(32, 32, 3)]
    with torch.inference_mode():
        wanted = model(**processor(images, return_tensors="pt")).logits.softmax(1)
    backend = ImageClassifier.load(tmp_path, threads=1)
    try:
        assert (torch.tensor(classified(backend, *map(encoded, images))) - wanted).abs().max() < 1e-5
    finally:
        backend.close()


def test_every_format_is_read(backend: ImageClassifier) -> None:
    image = picture(64, 64, 5)
    (wanted,), _, _ = looked(backend, encoded(image))
    for kind, options in (("WEBP", {"lossless": True}), ("JPEG", {"quality": 100, "subsampling": 0}), ("GIF", {})):
        (found,), _, reason = looked(backend, encoded(image, kind, **options))
        assert not reason and max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < (40 if kind == "GIF" else 6)


def shown(image: Image.Image, kind: str = "PNG", **options: Any) -> Image.Image:
    return Image.frombytes("RGB", (SIDE, SIDE), pixels(encoded(image, kind, **options), **SIZE))


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (40, 40), (200, 10, 10, 0))
    clear.paste((200, 10, 10, 255), (0, 0, 20, 40))
    for kind in ("PNG", "WEBP"):
        found = shown(clear, kind, **({"lossless": True} if kind == "WEBP" else {}))
        assert found.getpixel((30, 16)) == (255, 255, 255) and found.getpixel((2, 16)) == (200, 10, 10)
    palette = Image.new("P", (40, 40), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert shown(palette, transparency=1).getpixel((5, 5)) == (255, 255, 255)


def test_a_camera_held_sideways_is_turned_upright() -> None:
    half = Image.new("RGB", (40, 40), (0, 0, 0))
    half.paste((255, 255, 255), (0, 0, 40, 20))  # white above
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter: what is above goes to the right
    found = shown(half, "JPEG", exif=exif)
    assert found.getpixel((28, 16))[0] > 240 and found.getpixel((4, 16))[0] < 15  # type: ignore[index]


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    grey = Image.new("I;16", (32, 32), 0x8040)
    assert shown(grey).getpixel((3, 3)) == (0x80, 0x80, 0x80)


def test_only_the_first_frame_of_a_gif_counts() -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    found = shown(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert found.getpixel((9, 9))[0] > 240  # type: ignore[index]


def png_of(width: int, height: int) -> bytes:
    """A valid beginning of a PNG of any size: its rows are all zeros, which pack a thousand to one."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress(bytes(width // 8 + 1) * min(height, 2000), 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (png_of(50_000, 50_000), "million pixels"),
        (png_of(20_000, 10), "times the other"),
        (png_of(0, 10), "no size"),
        (b"", "no PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no PNG, JPEG, WebP or GIF"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "cut off"),
        (b"\xff\xd8\xff\xe0\0\x02", "cut off"),
        (b"\xff\xd8" + b"\xff" * 3_000_000, "no frame header"),
        (encoded(picture(), "JPEG") + b"\xff\xda" * 64, "scans"),
        (b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\xff" * 6, "million pixels"),
        (b"\0" * (4 << 20) + b"\0", "4 MiB"),
    ],
)
def test_what_can_be_told_from_the_first_bytes_is_refused_by_them(image: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        inspect(image)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_sizes_are_read_as_the_library_reads_them(kind: str) -> None:
    for options in ({}, {"lossless": True}, {"progressive": True}):
        data = encoded(picture(123, 45), kind, **options)
        facts = inspect(data)
        assert (
            (facts.format, facts.width, facts.height) == (kind, 123, 45) == (kind, *Image.open(io.BytesIO(data)).size)
        )
    if kind == "WEBP":
        assert inspect(encoded(picture(mode="RGBA"), kind, exif=Image.Exif().tobytes())).width == 60  # extended form


def test_a_gif_whose_frame_is_larger_than_it_says_is_refused() -> None:
    image = bytearray(encoded(Image.new("L", (8, 8)), "GIF"))
    at = image.index(b"\x2c", 13)
    image[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    assert inspect(bytes(image)).width == 8 and MAX_PIXELS < 60_000**2
    with pytest.raises(ImageError):
        pixels(bytes(image), **SIZE)


def test_a_broken_image_is_told_and_the_next_one_decoded(backend: ImageClassifier) -> None:
    whole = encoded(picture(300, 300, 7))
    seen, code, reason = looked(backend, whole[: len(whole) // 2])
    assert seen == () and code == "invalid_image" and reason.startswith("the PNG can't be decoded")
    seen, code, reason = looked(backend, whole, b"\x89PNG", whole)
    assert seen == () and code == "invalid_image" and reason.startswith("image 1: ")
    assert looked(backend, whole)[0] != ()


def test_a_killed_decoder_is_replaced(backend: ImageClassifier) -> None:
    assert looked(backend, encoded(picture()))[0]
    (child,) = backend._decoder._children[:1]
    assert child._process is not None
    before = child._process.pid
    child._process.kill()
    child._process.wait()
    assert looked(backend, encoded(picture()))[0]
    assert all(c._process is None or c._process.pid != before for c in backend._decoder._children)


def child_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> decoder._Child:
    """A decoder's process that runs `code` instead, once it is ready."""
    program = tmp_path / "child"
    start = "import sys, time\nout = sys.stdout.buffer\nout.write(b'\\0')\nout.flush()\n"
    program.write_text(f"#!{sys.executable}\n{start}{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(decoder.sys, "executable", str(program))
    return decoder._Child(SIZE)


@pytest.mark.parametrize(
    "answer",
    [
        b"\0" + struct.pack(">I", 2**32 - 1),
        b"\0" + struct.pack(">I", SIDE * SIDE * 3 + 1) + bytes(SIDE * SIDE * 3 + 1),
        b"\1" + struct.pack(">I", 1001) + b"x" * 1001,
        b"\2" + struct.pack(">I", 1) + b"x",
        b"\1" + struct.pack(">I", 1) + b"\xff",
    ],
)
def test_a_decoder_that_answers_nonsense_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    child = child_that(tmp_path, monkeypatch, f"out.write({answer!r})\nout.flush()\ntime.sleep(20)")
    started = time.monotonic()
    assert child.pixels(b"an image")[1].startswith("it takes more")
    assert child._process is None and time.monotonic() - started < 15


def test_a_decoder_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_WALL_SECONDS", 0.2)
    child = child_that(tmp_path, monkeypatch, "time.sleep(20)")
    started = time.monotonic()
    assert child.pixels(bytes(1 << 20))[1].startswith("it takes more")
    assert child._process is None and time.monotonic() - started < 15


def test_a_process_that_is_starting_does_not_outlive_its_decoder() -> None:
    child = decoder._Child(SIZE)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(child.pixels, b"no image")
        while (process := child._process) is None:
            time.sleep(0.001)
        child.kill()
        with pytest.raises(decoder.DecoderError):
            starting.result(timeout=20)
    assert process.returncode is not None
    with pytest.raises(decoder.DecoderError):
        child.pixels(b"no image")
    assert child._process is None


@pytest.mark.slow
def test_the_largest_image_fits_the_limits(backend: ImageClassifier) -> None:
    seen, _, reason = looked(backend, encoded(Image.new("RGB", (5000, 5000), (9, 9, 9)), "JPEG"))
    assert not reason and set(seen[0][:3]) == {9}


def test_the_card_says_what_it_is(backend: ImageClassifier) -> None:
    card = backend.card
    assert card.capabilities == ("image",) and card.labels == LABELS and card.backend == "image"
    assert card.image_tokens == card.context_length == TOKENS and card.vocab_size == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["SwinForImageClassification"]}, "SwinForImageClassification"),
        ({"architectures": None}, "not supported"),
        ({"id2label": {"1": "cat"}}, "id2label"),
        ({"id2label": {"0": "only"}}, "classifier.weight has shape"),
        ({"image_size": 64}, "do not fit"),
        ({"num_attention_heads": 5}, "attention|split"),
        ({"hidden_act": "relu"}, "activation"),
        ({"num_channels": 1}, "RGB"),
        ({"problem_type": "regression"}, "regression"),
    ],
)
def test_folders_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        ImageClassifier.load(vit_folder(tmp_path, **changes), threads=1)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    vit_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        ImageClassifier.load(tmp_path, threads=1)


def test_another_preprocessing_is_another_card(tmp_path: Path, backend: ImageClassifier) -> None:
    settings = json.loads((vit_folder(tmp_path) / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"resample": 3}))
    other = ImageClassifier.load(tmp_path, threads=1, model=backend.card.model)
    held = weakref.ref(other._model)
    other.close()
    gc.collect()
    assert held() is None, "a closed backend keeps no weights"
    assert other.card.hash != backend.card.hash
