"""A rank of `benchmarks/overlap.py`: PyTorch's recipe, sending gradients while backward goes on, on a CPU too."""

from __future__ import annotations

import sys

from turns_rank import recipe_of

from hvdkit.adapters import pytorch
from hvdkit.worker.entry import main

if __name__ == "__main__":
    pytorch.training.OVERLAPPED_ON = {"cuda", "cpu"}
    main(pytorch, recipe_of("pytorch").build, sys.argv[1:])
