"""Reports from other projects, tried on tasks of one's own (tests/reports): what hvdkit says before it trains."""

from __future__ import annotations

import functools
import json
import subprocess

import pytest

from hvdkit.runtimes import store
from tests.conftest import ROOT

REPORTS = ROOT / "tests" / "reports"
PROBABILITIES = "model: its outputs are probabilities"
RANDOM = "model: two calls in evaluation mode give different outputs"
# By module and framework: the task of a report, and how the line begins that names its fault; None: there is none.
SAID: dict[tuple[str, str], dict[str, str | None]] = {
    ("reports", "pytorch"): {
        "Task": None,
        "Softmax": PROBABILITIES,
        "LogSoftmax": None,
        "AlwaysDropout": RANDOM,
        "NoStatistics": "model: the outputs for a sample depend on the other samples of its batch",
        "Auc": "metrics: auc of a batch is not the sum",
        "FloatSums": None,
        "Augmented": None,
        "InPlace": "model: it changes its inputs in place",
        "RootOfZero": "model: the gradient of head.weight is not finite although the loss is",
        "SumLoss": "loss: ",
        "PlainList": "model: layers: its parameters are not registered and not trained",
        "Frozen": None,
        "Unused": None,
        "Tied": None,
        "Parallel": "model: expected the model itself, got a DataParallel around it",
        "Dictionary": "model: expected one tensor as its output, got a dict",
        "FromOne": "targets: expected labels for cross-entropy",
        "MapDataset": "MapDataset.samples: expected two splits",
        "Words": "ArraySplit: targets: expected numbers",
        "NotANumber": "samples: the training inputs have NaN",
        "Warned": None,
        "DefaultDouble": "model: 0.weight, 0.bias, 2.weight and 1 more: cast from float64",  # the last: it stays so
    },
    ("reports_keras", "tensorflow"): {
        "Task": None,
        "Softmax": PROBABILITIES,
        "AlwaysDropout": None,  # Keras 3 switches it off in evaluation all the same
        "Regularized": None,
        "Frozen": None,
        "Compiled": "model: it is compiled with Adam already",
        "Unbuilt": "model: expected parameters to train, got a model without any; give layers",
        "Policy": "precision: fp32, but 3 layers compute in bfloat16",  # the last: it stays so
    },
    ("reports_tensorflow", "tensorflow"): {
        "Task": None,
        "KerasModel": "model: expected a tf.Module, got keras's Sequential",
        "NoTraining": "TypeError",
        "LateVariables": "model: it makes variables when it is called, such as scale",
    },
}


@functools.cache
def said(module: str, runtime: str) -> dict[str, list[str]]:
    """What hvdkit says of each task of a module, by the runtime's framework."""
    interpreter = store.python_of(runtime)
    command = [interpreter, REPORTS / "checked.py", module, *SAID[module, runtime]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("module", "runtime", "kind"), [(*place, kind) for place, kinds in SAID.items() for kind in kinds]
)
def test_what_is_odd_in_a_task_is_said_before_training(module: str, runtime: str, kind: str) -> None:
    lines, expected = said(module, runtime)[kind], SAID[module, runtime][kind]
    if expected is None:
        assert lines == []
    else:
        assert len(lines) == 1 and lines[0].startswith(expected), lines
