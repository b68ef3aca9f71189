"""From an image file to the float32 pixels that a network of ImageNet's kind is fed with, the same bytes everywhere.

All arithmetic is Pillow's, in whole numbers, up to the normalisation: the same Pillow gives the same bytes.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.data.augment import Stream
from hvdkit.data.dataset import normalised

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as torchvision has them
AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # Szegedy et al. 2015, section 6, as torchvision draws it

Box = tuple[int, int, int, int]  # left, top, width, height


class CorruptImage(Exception):
    """A file that cannot be read as an image; the text is the reason, in one line."""


def read(path: str) -> Image:
    """The file as an RGB image. Raises CorruptImage.

    Transparency is left out, 16 bits a channel are cut to their upper 8, orientation marks are not heeded.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is odd in a file but can be read
            image = Image.open(path, formats=("JPEG", "PNG"))
        with image:
            image.load()
            return _rgb(image)
    except MemoryError:
        raise
    except Image.UnidentifiedImageError:
        raise CorruptImage("neither JPEG nor PNG, whatever its name says") from None
    except Exception as error:  # damaged files make decoders fail in any way they like
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise CorruptImage((text or str(error) or type(error).__name__).splitlines()[0]) from None


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def for_training(image: Image, size: int, stream: Stream) -> np.ndarray:
    """A random part of random shape, `size` by `size`, mirrored by chance: (size, size, 3) float32.

    Of the stream's numbers the first one decides about mirroring.
    """
    flip = stream.next() & 1
    left, top, width, height = crop_box(image.width, image.height, stream)
    part = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(_resized(part, size))
    return normalised(pixels[:, ::-1] if flip else pixels, MEAN, DEVIATION)


def for_evaluation(image: Image, size: int, shorter: int) -> np.ndarray:
    """The centre of the image whose shorter side has been made `shorter` long: (size, size, 3) float32.

    Positions and lengths are rounded as torchvision's Resize and CenterCrop do. Nothing outside of the crop is
    computed, so that a narrow strip of an image takes no memory.
    """
    short, long = sorted((image.width, image.height))
    lengthened = int(shorter * long / short)
    width, height = (shorter, lengthened) if image.width <= image.height else (lengthened, shorter)
    left, top = round((width - size) / 2), round((height - size) / 2)
    across, down = image.width / width, image.height / height
    # a product may be rounded to beyond the edge
    right, bottom = min(image.width, (left + size) * across), min(image.height, (top + size) * down)
    box = (left * across, top * down, right, bottom)
    return normalised(np.asarray(_resized(image, size, box)), MEAN, DEVIATION)


def crop_box(width: int, height: int, stream: Stream) -> Box:
    """The part that RandomResizedCrop keeps: its share of the area uniform in AREA, the logarithm of its ratio of width
    to height uniform in RATIO's. After TRIES that do not fit, the largest part in the centre whose ratio is allowed.
    """
    for _ in range(TRIES):
        area = width * height * stream.uniform(*AREA)
        ratio = math.exp(stream.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        part = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        # drawn whether it fits or not, so that each try takes four numbers
        across, down = stream.next(), stream.next()
        if 0 < part[0] <= width and 0 < part[1] <= height:
            return across % (width - part[0] + 1), down % (height - part[1] + 1), *part
    part = width, height
    if width / height < RATIO[0]:
        part = width, max(1, round(width / RATIO[0]))
    elif width / height > RATIO[1]:
        part = max(1, round(height * RATIO[1])), height
    return (width - part[0]) // 2, (height - part[1]) // 2, *part


def _resized(image: Image, size: int, box: tuple[float, float, float, float] | None = None) -> Image:
    from PIL import Image

    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)
