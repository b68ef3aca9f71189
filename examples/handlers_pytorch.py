"""The regression with a handler: it prints the learning rate, and ends training when the validation is good enough.

hvdkit train examples/regression.yaml model.script=examples/handlers_pytorch.py -np 2
"""

from regression_pytorch import Diabetes

import hvdkit


class GoodEnough(hvdkit.Handler):
    def __init__(self, error):
        self.error = error

    def on_step_end(self, run):
        if run.is_root and run.step % 20 == 0:
            print(f"step {run.step}: learning rate {run.learning_rate:.3g}, loss {run.loss:.3f}", flush=True)

    def on_epoch_end(self, run):
        if run.progress.validation["absolute_error"] < self.error:
            run.stop(f"the error is below {self.error}")


class Stopping(Diabetes):
    def handlers(self):
        return [GoodEnough(self.options.get("error", 0.5))]


if __name__ == "__main__":
    hvdkit.run_task("pytorch", Stopping)
