"""A program that continues from a checkpoint of its own: `resumes.py --checkpoint FILE`."""

import sys
import time
from pathlib import Path

import horovod.mxnet as hvd
import mxnet as mx

hvd.init()
checkpoint = Path(sys.argv[sys.argv.index("--checkpoint") + 1])
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
print(f"starts at step {first}")
for step in range(first, 60):
    assert hvd.allreduce(mx.nd.ones((2,)), average=False, name="gradients").asnumpy()[0] == hvd.size()
    time.sleep(0.2)
    if hvd.rank() == 0:
        new = checkpoint.with_suffix(".new")
        new.write_text(str(step + 1))
        new.replace(checkpoint)
