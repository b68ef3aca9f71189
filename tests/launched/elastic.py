"""An elastic program in the form of Horovod's documentation, of which one rank is killed."""

import os
import signal
import time

import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.batch < 40:
        optimizer.zero_grad()
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
        state.batch += 1
        time.sleep(0.1)
        if state.batch % 10 == 0:
            print(f"batch {state.batch} of {hvd.size()}")
            state.commit()
        if state.batch == 15 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
