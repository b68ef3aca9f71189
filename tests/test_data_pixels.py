"""What becomes of an image's pixels: crops, sizes, odd modes, and the constants of normalising."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdkit.data import pixels as images
from hvdkit.data.augment import RandomStream, random_bits
from hvdkit.data.pixels import normalised

pytestmark = pytest.mark.check


def test_crops_are_drawn_as_the_paper_says() -> None:
    boxes = [images.crop_box(500, 375, RandomStream(int(bits))) for bits in random_bits(1, 0, np.arange(4000))]
    left, top, width, height = np.array(boxes).T
    assert np.all(left >= 0) and np.all(top >= 0) and np.all(left + width <= 500) and np.all(top + height <= 375)
    share, ratio = width * height / (500 * 375), width / height
    assert share.min() > 0.079 and share.max() <= 1
    assert ratio.min() > 0.74 and ratio.max() < 1.35
    assert abs(share[share < 0.3].mean() - 0.19) < 0.01  # uniform where every try fits
    assert abs(np.median(np.log(ratio[share < 0.3]))) < 0.03
    assert abs(np.mean(left / np.maximum(1, 500 - width)) - 0.5) < 0.02


@pytest.mark.parametrize(
    ("width", "height", "box"), [(1000, 10, (493, 0, 13, 10)), (10, 1000, (0, 493, 10, 13)), (1, 1, (0, 0, 1, 1))]
)
def test_where_no_crop_fits_the_centre_is_taken(width: int, height: int, box: images.Box) -> None:
    class High(RandomStream):
        def next(self) -> int:
            return 2**64 - 1

    assert images.crop_box(width, height, High(0)) == box


def test_evaluation_is_resize_and_centre_crop() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    for size in ((375, 500), (500, 375), (300, 300), (200, 1999)):
        image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
        short, long = 64, int(64 * max(size) / min(size))
        resized = image.resize((short, long) if size[0] <= size[1] else (long, short), Image.Resampling.BILINEAR)
        left, top = round((resized.width - 56) / 2), round((resized.height - 56) / 2)
        expected = np.asarray(resized.crop((left, top, left + 56, top + 56))).astype(float)
        got = images.for_evaluation(image, 56, 64) * np.array(images.DEVIATION) + np.array(images.MEAN)
        assert np.abs(got * 255 - expected).max() < 1.01  # at most one level, where rounding decides


def test_normalising_has_float32_constants() -> None:
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 256, 3)
    exact = (pixels / 255 - np.array(images.MEAN)) / np.array(images.DEVIATION)
    got = normalised(pixels, images.MEAN, images.DEVIATION)
    assert got.dtype == np.float32 and np.abs(got - exact).max() < 1e-6


def test_odd_modes_become_rgb(tmp_path: Path) -> None:
    grey = np.linspace(0, 255, 64 * 64).reshape(64, 64).astype(np.uint8)
    colour = np.stack([grey, grey[::-1], np.full_like(grey, 30)], axis=-1)
    picture = Image.fromarray(colour)
    cases: dict[str, tuple[Image.Image, np.ndarray, int]] = {
        "l.png": (Image.fromarray(grey), np.stack([grey] * 3, -1), 0),
        "la.png": (Image.fromarray(grey).convert("LA"), np.stack([grey] * 3, -1), 0),
        "one.png": (
            Image.fromarray(grey).point(lambda v: 255 * (v > 99)).convert("1"),
            np.stack([255 * (grey > 99)] * 3, -1),
            0,
        ),
        "sixteen.png": (Image.fromarray(grey.astype(np.uint16) * 256 + 77), np.stack([grey] * 3, -1), 0),
        "palette.png": (picture.quantize(256), colour, 40),
        "rgba.png": (picture.convert("RGBA"), colour, 0),
        "l.jpg": (Image.fromarray(grey), np.stack([grey] * 3, -1), 6),
        "cmyk.jpg": (picture.convert("CMYK"), colour, 30),
        "rgb.jpg": (picture, colour, 30),
    }
    for name, (image, expected, tolerance) in cases.items():
        image.save(tmp_path / name, quality=95)
        got = images.read(str(tmp_path / name))
        assert got.mode == "RGB" and np.abs(np.asarray(got).astype(int) - expected).max() <= tolerance, name
    see_through = picture.quantize(16)
    see_through.save(tmp_path / "p.png", transparency=bytes(range(16)))
    assert np.array_equal(np.asarray(images.read(str(tmp_path / "p.png"))), np.asarray(see_through.convert("RGB")))


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file, of PNG's specification, 5.3."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_what_is_damaged_is_called_so(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(tmp_path / "a.jpg")
    png, jpeg = ((tmp_path / name).read_bytes() for name in ("a.png", "a.jpg"))
    for content, reason in (
        (b"", "the file is empty"),
        (png[:20], "Truncated File Read"),
        (png.replace(b"IHDR\0", b"IHDR\1"), "damaged: it begins as PNG does"),
        (jpeg[:200], "Truncated File Read"),
        (jpeg[:3] + b"no", "damaged: it begins as JPEG does"),
        (jpeg[:-200], "image file is truncated"),
        (b"GIF89a", "neither JPEG nor PNG but GIF"),
    ):
        (tmp_path / "b.png").write_bytes(content)
        with pytest.raises(images.CorruptImage, match=reason):
            images.read(str(tmp_path / "b.png"))
    with pytest.raises(images.CorruptImage, match="No such file"):
        images.read(str(tmp_path / "gone.png"))


def test_the_guard_against_bombs_is_by_pixels(tmp_path: Path) -> None:
    def header(width: int, height: int) -> bytes:
        sizes = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", sizes) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")

    (tmp_path / "phone.png").write_bytes(header(16_320, 12_240))
    assert images.size_of(str(tmp_path / "phone.png")) == (16_320, 12_240), "200 million"
    (tmp_path / "bomb.png").write_bytes(header(60_000, 60_000))
    with pytest.raises(images.CorruptImage, match=r"Image size \(3600000000 pixels\) exceeds limit of 268435456"):
        images.read(str(tmp_path / "bomb.png"))
