"""hvdkit's commands as functions, such as `hvdkit.train("resnet20-digits", np=2)` (docs/python.md).

Each takes the options of the command of its name, and returns what that command writes; the command line calls them
too. They show progress on standard error, or in the notebook. Besides the errors named below they raise RequestError
for a wrong request, with all its faults and before anything starts; RunError if a run fails; and KeyboardInterrupt on
Ctrl-C, once all ranks have ended.
"""

from hvdkit.api.comparing import compare as compare
from hvdkit.api.comparing import parity as parity
from hvdkit.api.measuring import profile as profile
from hvdkit.api.measuring import published_profile as published_profile
from hvdkit.api.predicting import advise as advise
from hvdkit.api.predicting import memory as memory
from hvdkit.api.predicting import predict as predict
from hvdkit.api.predicting import sweep as sweep
from hvdkit.api.previewing import dry_run as dry_run
from hvdkit.api.submitting import submit as submit
from hvdkit.api.training import diff as diff
from hvdkit.api.training import evaluate as evaluate
from hvdkit.api.training import export as export
from hvdkit.api.training import generate as generate
from hvdkit.api.training import predict_images as predict_images
from hvdkit.api.training import train as train
