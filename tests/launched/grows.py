"""An elastic program in the form of Horovod's documentation, for which a place comes while it is still being built, and
goes later: `grows.py SLOTS`, a file that its host discovery script prints.
"""

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

slots = Path(sys.argv[1])
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
if not slots.read_text().startswith("localhost:2"):
    slots.write_text("localhost:2\n")
    time.sleep(4)  # until the driver has seen it, and nobody listens to what it tells


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    print(f"size {hvd.size()}")
    while len(state.sizes) < 3:
        optimizer.zero_grad()
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
        state.batch += 1
        if hvd.size() != state.sizes[-1]:
            state.sizes = [*state.sizes, hvd.size()]
            if hvd.size() == 2 and hvd.rank() == 0:
                slots.write_text("localhost:1\n")
        time.sleep(0.1)
        state.commit()
    print(f"sizes {state.sizes} after {state.batch} batches")


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, sizes=[1]))
