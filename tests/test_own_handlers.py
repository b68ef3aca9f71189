"""Handlers of a task of the user's own: what they see, and how they end a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdkit.core.loop import Handler, Loop
from hvdkit.errors import RequestError
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe import schema
from hvdkit.worker import setup, train
from tests import local_adapter
from tests.conftest import ROOT, Hvdkit
from tests.local_adapter import Linear
from tests.own_tasks import DOCUMENT
from tests.test_own_task import REGRESSION, SCRIPT, Sides

pytestmark = pytest.mark.long


class Counts(Handler):
    """Notes the steps at which it is called, and ends the run after the `last` epoch."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.steps: list[int] = []
        self.rates: list[float] = []

    def on_step_end(self, run: Loop) -> None:
        self.steps.append(run.step)
        self.rates.append(run.learning_rate)

    def on_epoch_end(self, run: Loop) -> None:
        if run.epoch == self._last:
            run.stop("it is enough")


@pytest.mark.check
def test_a_handler_sees_each_step_and_ends_the_run(tmp_path: Path) -> None:
    adapter: Any = local_adapter.adapter
    (tmp_path / "own.py").write_text("# the class is in this file")
    made: list[Counts] = []

    class Handled(Sides):
        def handlers(self) -> list[Counts]:
            made.append(Counts(last=1))
            return made[-1:]

    (tmp_path / "own.yaml").write_text(json.dumps({**DOCUMENT, "schedule": {"decay": "step", "milestones": [1]}}))
    recipe = schema.load(tmp_path / "own.yaml")
    script = setup.RankScript(lambda table: Linear(2, 2), Handled)
    out = tmp_path / "run"
    out.mkdir()
    for last, resume in ((1, False), (2, True)):
        result = train.train(adapter, script, recipe, out, Heartbeat(), resume)
        steps = 10 * (last + 1)
        assert result.steps == steps and made[-1].steps == list(range(1 if not resume else 21, steps + 1))
        assert (out / "checkpoints" / "last").readlink() == Path(f"step-{steps:08}")
        if not resume:
            assert result.stopped_early == "stopped early after step 20 of 30: it is enough" and result.epochs == 2
            assert made[-1].rates == pytest.approx([made[-1].rates[0]] * 10 + [made[-1].rates[0] / 10] * 10)


@pytest.mark.check
@pytest.mark.parametrize(
    ("given", "got"),
    [
        (None, "a NoneType"),
        ([Counts], "in it the class Counts; call it"),
        ([print], "in it a builtin_function_or_method"),
    ],
)
def test_what_is_no_handler_is_refused(given: Any, got: str, tmp_path: Path) -> None:
    adapter: Any = local_adapter.adapter
    (tmp_path / "own.py").write_text("# the class is in this file")
    (tmp_path / "own.yaml").write_text(json.dumps(DOCUMENT))
    kind = type("Handled", (Sides,), {"handlers": lambda task: given})
    script = setup.RankScript(lambda table: Linear(2, 2), kind)
    with pytest.raises(RequestError) as told:
        train.train(adapter, script, schema.load(tmp_path / "own.yaml"), None, Heartbeat())
    assert str(told.value) == f"Handled.handlers: expected a list of objects of hvdkit.Handler, got {got}"


@pytest.mark.usefixtures("warm")
def test_the_example_with_a_handler_stops_on_two_ranks(hvdkit: Hvdkit, tmp_path: Path) -> None:
    script = ROOT / "examples" / "handlers_pytorch.py"
    done = hvdkit("train", REGRESSION, f"model.script={script}", "-np", 2, "threads=1", "--out", "run")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["stopped_early"].endswith(" of 300: the error is below 0.5") and result["steps"] < 300
    assert result["stopped_early"] in done.stdout and result["val_samples"] == 100
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").rglob("*"))
    assert logs.count("step 20: learning rate ") == 1, "rank 0 alone prints"


@pytest.mark.usefixtures("warm")
def test_an_error_in_a_handler_is_a_line(hvdkit: Hvdkit, tmp_path: Path) -> None:
    method = "    def on_step_end(self):\n        pass"
    told = "takes 1 positional argument but 2 were given (in Bad.on_step_end)"
    end = f"from hvdkit.core.loop import Handler\n\nclass Bad(Handler):\n{method}\n\n"
    end += "Task.handlers = lambda task: [Bad()]\nTask.loss = lambda task, y, t: ((y - t) ** 2).mean()\n"
    (tmp_path / "own.py").write_text(SCRIPT.format(framework="pytorch", end=end + "run_task(pytorch, Task)"))
    (tmp_path / "own.yaml").write_text(json.dumps({**DOCUMENT, "batch_size": 16}))
    done = hvdkit("train", "own.yaml", "--out", "run")
    assert done.returncode == 1 and told in done.stderr, done.stderr
    assert f"model.script: {tmp_path}/own.py" in done.stderr and "Traceback" not in done.stderr.split("log")[0]
