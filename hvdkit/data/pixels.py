"""Image files as normalised float32 pixels, for training and for evaluation on ImageNet.

Up to the normalisation all arithmetic is Pillow's, in integers, so the same Pillow gives the same bytes everywhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hvdkit.data.augment import RandomStream

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in torchvision
AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # Szegedy et al. 2015, section 6, as in torchvision

# Formats that are not read: how their files begin, from which byte on.
_OTHERS = [
    ("WebP", 8, b"WEBP"), ("GIF", 0, b"GIF8"), ("BMP", 0, b"BM"), ("TIFF", 0, b"II*\0"), ("TIFF", 0, b"MM\0*"),
    ("HEIC", 4, b"ftyphei"), ("HEIC", 4, b"ftypmif1"), ("AVIF", 4, b"ftypavif"), ("JPEG XL", 0, b"\0\0\0\x0cJXL "),
]  # fmt: skip

_SIGNATURES = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
_MOST_PIXELS = 2**28  # of an image, for which RGB takes 0.8 GB; phones take photos of 200 million
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # Pillow's Transpose, by EXIF's orientation

T = TypeVar("T")
Box = tuple[int, int, int, int]  # left, top, width, height


class CorruptImage(Exception):
    """A file that cannot be read as an image. The text is the reason, in one line."""


def no_image(path: str, start: bytes) -> str:
    """Why a file that begins with these bytes is no image that hvdkit reads."""
    if not start:
        return "the file is empty"
    begun = next((name for name, sign in _SIGNATURES.items() if start.startswith(sign)), None)
    if begun:
        return f"damaged: it begins as {begun} does, but what follows is none"
    of = next((name for name, offset, sign in _OTHERS if start[offset:].startswith(sign)), None)
    if of:
        return f"neither JPEG nor PNG but {of}: convert it to PNG"
    return f"neither JPEG nor PNG{', whatever its name says' if path.lower().endswith(SUFFIXES) else ''}"


def looks_right(start: bytes) -> bool:
    """Whether a file that begins with these bytes is JPEG or PNG."""
    return start.startswith(tuple(_SIGNATURES.values()))


def read(path: str, upright: bool = False, enough: int | None = None) -> Image:
    """The file as an RGB image. Raises CorruptImage.

    Transparency is dropped and 16 bits per channel are cut to the upper 8. With `upright` the image is turned as its
    EXIF orientation says. A JPEG is decoded at a half, a quarter or an eighth of its size, which is several times as
    fast, if both sides are at least `enough` pixels then.
    """

    def decoded(image: Image) -> Image:
        if enough is not None:
            image.draft(None, (enough, enough))
        image.load()
        return _rgb(_upright(image) if upright else image)

    return _opened(path, decoded)


def size_of(path: str) -> tuple[int, int]:
    """Width and height in pixels, by the file's header. Raises CorruptImage."""
    return _opened(path, lambda image: image.size)


def _opened(path: str, use: Callable[[Image], T]) -> T:
    """What `use` returns for the image, not yet decoded. What fails is raised as CorruptImage."""
    from PIL import Image

    if Image.MAX_IMAGE_PIXELS == 2**30 // 12:  # Pillow's own limit: half of what it refuses
        Image.MAX_IMAGE_PIXELS = _MOST_PIXELS // 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about oddities of files that can be read
            image = Image.open(path, formats=tuple(_SIGNATURES))
        with image:
            return use(image)
    except MemoryError:
        raise
    except Exception as error:  # decoders can fail on damaged files with any exception
        if isinstance(error, Image.UnidentifiedImageError):
            try:
                with open(path, "rb") as file:  # noqa: PTH123 - for each image
                    raise CorruptImage(no_image(path, file.read(16))) from None
            except OSError as gone:
                error = gone
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise CorruptImage((text or str(error) or type(error).__name__).splitlines()[0]) from None


def _upright(image: Image) -> Image:
    """The decoded image, turned as its EXIF orientation says; as it is if its EXIF data cannot be read."""
    turn = None
    with suppress(Exception):  # cameras and editors write anything there
        turn = _TURNS.get(image.getexif().get(0x0112, 1))
    from PIL import Image

    return image if turn is None else image.transpose(Image.Transpose(turn))


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def for_training(image: Image, size: int, stream: RandomStream) -> np.ndarray:
    """A random crop, resized, and flipped half of the time: (size, size, 3) float32.

    The first number of the stream decides about the flip.
    """
    flip = stream.next() & 1
    left, top, width, height = crop_box(image.width, image.height, stream)
    cropped = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(_resized(cropped, size))
    return normalised(pixels[:, ::-1] if flip else pixels, MEAN, DEVIATION)


def for_evaluation(
    image: Image, size: int, shorter: int, mean: tuple[float, ...] = MEAN, deviation: tuple[float, ...] = DEVIATION
) -> np.ndarray:
    """The `centre` of the image, normalised: (size, size, 3) float32."""
    return normalised(centre(image, size, shorter), mean, deviation)


def centre(image: Image, size: int, shorter: int) -> np.ndarray:
    """The centre of the image after resizing its shorter side to `shorter`: (size, size, 3) uint8.

    Positions and lengths are rounded as in torchvision's Resize and CenterCrop. Only the crop is computed, so that a
    very narrow image does not take much memory.
    """
    short, long = sorted((image.width, image.height))
    lengthened = int(shorter * long / short)
    width, height = (shorter, lengthened) if image.width <= image.height else (lengthened, shorter)
    left, top = round((width - size) / 2), round((height - size) / 2)
    across, down = image.width / width, image.height / height
    # rounding can put a product beyond the edge
    right, bottom = min(image.width, (left + size) * across), min(image.height, (top + size) * down)
    box = (left * across, top * down, right, bottom)
    return np.asarray(_resized(image, size, box))


def normalised(pixels: np.ndarray, mean: tuple[float, ...], deviation: tuple[float, ...]) -> np.ndarray:
    """(…, width, channels) uint8 as float32: (v − 255·mean) · 1/(255·deviation), both constants rounded to float32.

    Each pixel takes two elementary operations with one rounding each, so any NumPy gives the same bits.
    """
    offset = (255 * np.array(mean)).astype(np.float32)
    factor = (1 / (255 * np.array(deviation))).astype(np.float32)
    # Whole rows at once: NumPy's inner loop over three channels takes ten times as long.
    width, channels = pixels.shape[-2:]
    rows = pixels.reshape(*pixels.shape[:-2], width * channels).astype(np.float32)
    rows -= np.tile(offset, width)
    rows *= np.tile(factor, width)
    return rows.reshape(pixels.shape)


def crop_box(width: int, height: int, stream: RandomStream) -> Box:
    """The crop of torchvision's RandomResizedCrop.

    The fraction of the area is uniform in AREA, the logarithm of the aspect ratio uniform in that of RATIO. After TRIES
    crops that do not fit, it is the largest crop in the centre with an allowed ratio.
    """
    for _ in range(TRIES):
        area = width * height * stream.uniform(*AREA)
        ratio = math.exp(stream.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        box = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        # drawn even if the crop does not fit, so that each try takes four numbers
        across, down = stream.next(), stream.next()
        if 0 < box[0] <= width and 0 < box[1] <= height:
            return across % (width - box[0] + 1), down % (height - box[1] + 1), *box
    box = width, height
    if width / height < RATIO[0]:
        box = width, max(1, round(width / RATIO[0]))
    elif width / height > RATIO[1]:
        box = max(1, round(height * RATIO[1])), height
    return (width - box[0]) // 2, (height - box[1]) // 2, *box


def _resized(image: Image, size: int, box: tuple[float, float, float, float] | None = None) -> Image:
    from PIL import Image

    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
