"""Rank 1 takes 50 ms longer in each step, and all wait for it."""

import time

import sound


class Slow(sound.Points):
    def fault(self, step):
        if sound.RANK == 1:
            time.sleep(0.05)


sound.run(Slow)
