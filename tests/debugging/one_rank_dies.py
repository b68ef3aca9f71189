"""Rank 1 is killed, as by the kernel where memory runs out."""

import os
import signal

import sound


class Killed(sound.Points):
    def fault(self, step):
        if step == 12 and sound.RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)


sound.run(Killed)
