"""Draw images to try training on: noisy shapes in two random colours, a folder for each class.

python examples/draw_shapes.py photos                    # discs, lying and upright stripes: 40 of each
python examples/draw_shapes.py others rings chequers     # other classes, for fine-tuning
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 96
BASIC = ("disc", "lying stripes", "upright stripes")


def draw(name: str, random: np.random.Generator) -> Image.Image:
    """A shape at a random place; in `inside` is True where it is."""
    y, x = np.mgrid[:SIDE, : SIDE + 20] / SIDE
    if name in ("disc", "rings"):
        distance = np.hypot(x - random.uniform(0.4, 0.8), y - random.uniform(0.4, 0.6))
        inside = distance < 0.3 if name == "disc" else np.sin(40 * distance) > 0
    else:
        waves = {"lying stripes": [y], "upright stripes": [x], "chequers": [x, y]}[name]
        turns, start = random.uniform(3, 5), random.uniform()
        inside = np.prod([np.sin(2 * np.pi * (wave * turns + start)) for wave in waves], axis=0) > 0
    dark, light = random.integers(0, 100, 3), random.integers(155, 256, 3)
    pixels = np.where(inside[..., None], light, dark) + random.normal(0, 8, (*inside.shape, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def folder(root: Path, names: tuple[str, ...] = BASIC, count: int = 40, seed: int = 0) -> Path:
    """A folder with `count` images of each class: `root`/disc/000.jpg and so on, JPEG and PNG in turn."""
    random = np.random.default_rng(seed)
    for name in names:
        (root / name).mkdir(parents=True)
        for number in range(count):
            draw(name, random).save(root / name / f"{number:03}.{('jpg', 'png', 'JPEG')[number % 3]}")
    return root


if __name__ == "__main__":
    folder(Path(sys.argv[1]), tuple(sys.argv[2:]) or BASIC)
