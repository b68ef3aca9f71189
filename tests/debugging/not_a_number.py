"""One sample has a value that is no number."""

import sound


class Missing(sound.Points):
    def samples(self):
        train, val = super().samples()
        train.inputs[777, 3] = float("nan")
        return train, val


sound.run(Missing)
