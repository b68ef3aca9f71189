"""Rank 1 waits for something before it starts Horovod, such as a lock or a slow disk."""

import time

import sound

if sound.RANK == 1:
    time.sleep(600)

sound.run(sound.Points)
