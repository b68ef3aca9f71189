"""The ranks enter the same collective with tensors of different shapes."""

import horovod.torch as hvd
import sound
import torch


class Uneven(sound.Points):
    def fault(self, step):
        if step == 12:
            hvd.allreduce(torch.ones(4 + sound.RANK), name="norm")


sound.run(Uneven)
