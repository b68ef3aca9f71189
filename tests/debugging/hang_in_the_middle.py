"""A collective below an `if` that only rank 0 enters; the others go on to the next one."""

import horovod.torch as hvd
import sound
import torch


class Conditional(sound.Points):
    def fault(self, step):
        if step == 12 and sound.RANK == 0:
            hvd.allreduce(torch.ones(1), name="norm")


sound.run(Conditional)
