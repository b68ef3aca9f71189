"""The examples for own models: on two real ranks, short, and they learn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import FRAMEWORKS, ROOT
from launching import framework_job
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from hvdkit.checkpoint.weights import save_weights
from hvdkit.errors import RunError
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.tasks.image_classification import cross_entropy

pytestmark = pytest.mark.long

ACCURACY = 0.9  # of 360 digits after ten epochs; a small model that has learned nothing has 0.1
EPOCH = re.compile(r"^epoch (\d+): accuracy ([\d.]+), loss ([\d.]+)$", re.MULTILINE)


def example(framework: str) -> Path:
    return ROOT / "examples" / f"own_model_{framework}.py"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_own_network_learns_on_two_ranks(framework: str, tmp_path: Path) -> None:
    job = framework_job(framework, tmp_path, example(framework), tmp_path / "new" / "own.safetensors")
    LAUNCHERS["direct"].run(job)
    epochs = EPOCH.findall(job.log(0).read_text())
    assert len(epochs) == 10
    assert float(epochs[-1][1]) > ACCURACY
    assert float(epochs[-1][2]) < float(epochs[0][2])
    assert not EPOCH.search(job.log(1).read_text())  # the root alone prints
    # what it has saved is the model of the last line, whichever framework reads it
    kept = tmp_path / "new" / "own.safetensors"
    assert f"weights: {kept}" in job.log(0).read_text().splitlines()
    accuracy, loss = evaluated(load_file(kept))
    assert accuracy == pytest.approx(float(epochs[-1][1]), abs=1.5 / 360)  # one image may stand on the edge
    assert loss == pytest.approx(float(epochs[-1][2]), abs=2e-4)


def evaluated(weights: dict[str, np.ndarray]) -> tuple[float, float]:
    """Accuracy and mean loss on the 360 digits, by NumPy: a convolution and one dense layer, or two dense ones."""
    digits = load_digits()
    x, labels = digits.images[:360] / 16, digits.target[:360]
    *hidden, last = sorted(name for name in weights if name.endswith("weight"))
    for name in hidden:
        weight, bias = weights[name].astype(float), weights.get(name.replace("weight", "bias"), np.zeros(1))
        if weight.ndim == 4:  # 3×3, padded by 1, then pooled 2×2
            windows = sliding_window_view(np.pad(x, ((0, 0), (1, 1), (1, 1))), (3, 3), (1, 2))
            x = np.einsum("nhwij,cij->nchw", windows, weight[:, 0]) + bias[:, None, None]
            x = x.reshape(360, -1, 4, 2, 4, 2).max((3, 5))
        else:
            x = x.reshape(360, -1) @ weight.T + bias
        x = np.maximum(x, 0)
    logits = x.reshape(360, -1) @ weights[last].T + weights.get(last.replace("weight", "bias"), 0)
    return float(np.mean(logits.argmax(1) == labels)), float(cross_entropy(logits, labels).mean())


def test_weights_that_cannot_be_saved_are_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"own\.safetensors: cannot be written \(Not a directory|File exists\)"):
        save_weights({"fc.weight": np.zeros(2)}, tmp_path / "file" / "own.safetensors")
    saved = save_weights({"fc.weight": np.ones(2), "optimizer.momentum.fc.weight": np.ones(2)}, tmp_path / "own")
    assert load_file(saved).keys() == {"fc.weight"}


@pytest.mark.check
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_examples_are_short_and_know_no_recipe(framework: str) -> None:
    source = example(framework).read_text()
    assert sum(bool(line) for line in source.splitlines()) <= 42
    assert "recipe" not in source.lower().replace("hvdkit.recipe.", "")
    assert "resnet" not in source.lower()


@pytest.mark.check
def test_the_pages_show_the_examples_as_they_are() -> None:
    for page, language, file in (
        ("own-model.md", "python", "regression_pytorch.py"),
        ("own-model.md", "yaml", "regression.yaml"),
        ("own-model.md", "python", example("pytorch").name),
        ("own-model.md", "python", "handlers_pytorch.py"),
        ("data.md", "python", "native_pytorch.py"),
    ):
        shown = f"```{language}\n{(ROOT / 'examples' / file).read_text()}```"
        assert shown in (ROOT / "docs" / page).read_text(), file
