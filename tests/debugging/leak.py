"""What each step keeps is never freed."""

import numpy as np
import sound

kept = []


class Leak(sound.Points):
    def fault(self, step):
        kept.append(np.ones(2**17))  # 1 MiB


sound.run(Leak)
