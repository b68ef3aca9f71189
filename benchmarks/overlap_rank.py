"""A rank of `benchmarks/overlap.py`: PyTorch's recipe, sending gradients while backward goes on, on a CPU too."""

from __future__ import annotations

import importlib.util
import sys

from hvdkit import paths
from hvdkit.adapters import pytorch
from hvdkit.core.main import main

if __name__ == "__main__":
    pytorch._OVERLAPPED_ON = {"cuda", "cpu"}
    spec = importlib.util.spec_from_file_location("resnet", paths.script("pytorch"))
    assert spec and spec.loader
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    main(pytorch, recipe.build, sys.argv[1:])
