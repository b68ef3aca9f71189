"""A rank asks for more memory than there is."""

import sound
import torch


class Large(sound.Points):
    def fault(self, step):
        if step == 12 and sound.RANK == 1:
            torch.empty(2**50)


sound.run(Large)
