"""Loads TensorFlow for a rank: without its banner in each log, and a quarter sooner. Imported before all that needs it.

Keras, which comes with TensorFlow, imports scikit-learn where that is installed, for `keras.wrappers`: 1.3 of 5.8 s
(TensorFlow 2.21, Keras 3.15, a slow core). No training needs those, so scikit-learn is out of sight meanwhile; whoever
asks for it later has it, and whoever has imported it or Keras before keeps what they have.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read once, when TensorFlow loads

_WRAPPED = "sklearn"
_hides = _WRAPPED not in sys.modules
if _hides:
    sys.modules[_WRAPPED] = None  # type: ignore[assignment]  # so an import fails as if it were not installed
try:
    import tensorflow  # noqa: F401
finally:
    if _hides:
        del sys.modules[_WRAPPED]
