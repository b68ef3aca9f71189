"""One rank of `hvdkit parity`: does this framework compute the same as the reference?

The leader (the reference's ranks) trains a few steps in float64 and writes a trace: the gradients of a few batches at
the initial weights, and the complete state after each step. A follower repeats this from the same states and measures
its errors. All ranks compute; rank 0 writes and compares, since all ranks have the same weights and any rank's buffers
will do. Errors of arrays are ‖a − reference‖ / ‖reference‖, of numbers |a − reference| / |reference|.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from hvdkit.baselines.registry import label
from hvdkit.core.metrics import evaluate
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Gradients
from hvdkit.core.step_plan import StepPlan
from hvdkit.data.dataset import Batch, Split
from hvdkit.errors import RunError
from hvdkit.files import write_atomic
from hvdkit.recipe.communication import Uncompressed
from hvdkit.recipe.schema import Recipe
from hvdkit.worker import deviation
from hvdkit.worker.parity_trace import (
    Arrays,
    Figures,
    Part,
    buffers,
    error,
    errors,
    named,
    same,
    save_arrays,
    unnamed,
    weights,
)
from hvdkit.worker.setup import Script, Setup, start

if TYPE_CHECKING:
    from hvdkit.heartbeat import Heartbeat

FREE_STEPS = 5  # free-running losses that are compared; later ones diverge chaotically from rounding
# Batches whose float32 gradients are compared. Rounding flips the sign of a few values before a ReLU, and a flip
# changes gradients a thousand times as much as rounding itself. With several batches, every framework has some flips.
SINGLE_BATCHES = 5


class Participant:
    """One rank of one framework; its methods are collective.

    Gradients are averaged uncompressed at each update by Horovod's own allreduce, whatever the recipe says, as
    compression is not a difference between frameworks. Raises RequestError as `Setup.session` and `StepPlan` do.
    """

    def __init__(self, setup: Setup, part: Part, heartbeat: Heartbeat) -> None:
        dense = {"compression": Uncompressed(), "sync": None, "allreduce": "ring"}
        recipe = setup.recipe.model_copy(update=dense | {"steps": part.steps, "check_ranks": 0})
        self._adapter, self._mesh, self._dataset = setup.adapter, setup.mesh, setup.dataset
        self._task, self._architecture, self._part = setup.task, setup.architecture, part
        self._recipe, self._heartbeat = recipe, heartbeat
        exact, single = (recipe.model_copy(update={"precision": each}) for each in (part.precision, "fp32"))
        self._exact = setup.session(exact, setup.strategy(exact))
        self._single = self._exact if exact == single else setup.session(single, setup.strategy(single, "single"))
        self._plan = StepPlan(recipe, len(setup.dataset.train), setup.mesh.data.size)
        self._steps = self._plan.total_steps
        self._initial = self._exact.state()

    def take_part(self) -> None:
        """Write the trace if this rank leads, then compare with it and write the findings.

        Raises RunError if a file cannot be written, FileNotFoundError if there is no trace.
        """
        if self._part.leads:
            self.lead()
        findings = self.follow()
        if self._mesh.is_root:
            write_atomic(
                self._part.findings(label(self._adapter.NAME, self._adapter.rival)),
                json.dumps(findings, indent=1) + "\n",
            )

    def lead(self) -> None:
        """Write the trace. Raises RunError if the reference's own loss is NaN or infinite."""
        part, root = self._part, self._mesh.is_root
        figures = Figures(batches=self._batches())
        for number, batch in self._probe_batches():
            exact = self._exact.gradients(batch)
            if root:
                save_arrays(part.probe(number), named(exact))
        self._exact.load_state(self._initial)
        self._wait("probes")
        figures.logits_f32, figures.gradients_f32 = self._single_errors()
        self._save_state(0)
        for step, group in self._groups():
            figures.losses.append(self._step(step, group))
            if not np.isfinite(figures.losses[-1]):
                raise RunError(
                    f"the reference's own loss is no number after step {step + 1}, so nothing can be compared; lower "
                    "optimizer.learning_rate"
                )
            self._save_state(step + 1)
        self._wait("steps")
        self._exact.load_state(load_file(part.state(self._steps)))  # rank 0's running statistics everywhere
        figures.metrics, _ = self._evaluate()
        if root:
            save_arrays(part.folder / "evaluation.safetensors", {"logits": self._eval_logits()})
            write_atomic(part.figures, json.dumps(asdict(figures)) + "\n")
        self._wait("trace")

    def follow(self) -> dict[str, Any]:
        """Compare with the trace and return the findings; only rank 0's are used."""
        adapter, part = self._adapter, self._part
        expected = Figures(**json.loads(part.figures.read_text()))
        batches = self._batches()
        start, after, reference = load_file(part.state(0)), load_file(part.state(1)), unnamed(load_file(part.probe(0)))

        self._exact.load_state(self._initial)
        exact = self._exact.gradients(self._first_batch())
        logits_f32, gradients_f32 = self._single_errors()
        applied = errors(exact.averaged, self._mean_of_own(exact))

        free, first = self._free_run()
        forced = self._forced_steps()

        self._exact.load_state(load_file(part.state(self._steps)))
        found_metrics, total = self._evaluate()
        logits = load_file(part.folder / "evaluation.safetensors")["logits"]
        eval_logits = error(self._eval_logits(), logits)
        apart = [error(np.array([found_metrics[name]]), np.array([value])) for name, value in expected.metrics.items()]

        losses = [error(np.array([a]), np.array([b])) for a, b in zip(free, expected.losses, strict=False)]
        found: dict[str, Any] = {
            "framework": adapter.NAME,
            "versions": adapter.versions(),
            "steps": self._steps,
            "precision": part.precision,
            "exact_sums": "exact-sums" in adapter.CAPABILITIES,
            "batches_equal": batches == expected.batches,
            "initial_weights_equal": same(self._initial, _as_dtype_of(self._initial, start)),
            "logits_f64": error(exact.outputs, reference.outputs),
            "gradients_f64": self._in_network_order(exact.own, reference.own),
            "applied_f64": applied,
            "buffers_f64": errors(buffers(first), buffers(after)),
            "weights_f64": errors(weights(first), weights(after)),
            "losses_f64": losses,
            "step_f64": [max(each.values()) for each in forced],
            "step_tensors_f64": forced if part.precision == "fp32" else [],
            "evaluation_f64": max(eval_logits, *apart),
            "logits_f32": logits_f32,
            "gradients_f32": gradients_f32,
            "reference_logits_f32": expected.logits_f32,
            "reference_gradients_f32": expected.gradients_f32,
            "correct": round(found_metrics.get("accuracy", 0.0) * total),
            "total": total,
        }
        if part.precision == "fp32":  # rounding deviates everywhere
            return found | {"first_deviation": None, "likely_cause": None}
        evidence = deviation.Evidence(
            architecture=self._architecture,
            batches_equal=found["batches_equal"],
            initial=(self._initial, start),
            gradients=(exact, reference),
            applied=applied,
            after=(first, after),
            forced=forced,
            eval_logits=eval_logits,
            evaluation=found["evaluation_f64"],
        )
        cause = deviation.first_deviation(evidence)
        return found | {
            "first_deviation": cause.tensor if cause else None,
            "likely_cause": cause.cause if cause else None,
        }

    def _free_run(self) -> tuple[list[float], Arrays]:
        """The losses of the first steps from the initial weights, and the state after the first step."""
        self._exact.load_state(self._initial)
        losses: list[float] = []
        first: Arrays = {}
        for step, group in itertools.islice(self._groups(), FREE_STEPS):
            losses.append(self._step(step, group))
            first = first or self._exact.state()
        return losses, first

    def _forced_steps(self) -> list[dict[str, float]]:
        """Errors by tensor after each step; each step starts from the reference's state (teacher forcing)."""
        found = []
        for step, group in self._groups():
            self._exact.load_state(load_file(self._part.state(step)))
            self._step(step, group)
            found.append(errors(self._exact.state(), load_file(self._part.state(step + 1))))
        return found

    def _in_network_order(self, got: Arrays, reference: Arrays) -> dict[str, float]:
        """Errors by parameter, in order from the model's input to its output."""
        found = errors(got, reference)
        return {name: found[name] for name in self._architecture.parameter_shapes()}

    def _groups(self) -> Iterator[tuple[int, list[Batch]]]:
        """The number of each update and this rank's batches for it."""
        epochs = (self._plan.groups(self._dataset.train, self._mesh.shard, epoch) for epoch in range(self._plan.epochs))
        every = itertools.chain.from_iterable(epochs)
        for step, group in enumerate(itertools.islice(every, self._steps)):
            self._heartbeat.beat("parity step", step)
            yield step, group

    def _first_batch(self) -> Batch:
        return next(self._groups())[1][0]

    def _step(self, step: int, group: list[Batch]) -> float:
        """One update; returns the mean loss over all ranks."""
        adapter = self._adapter
        self._exact.set_learning_rate(self._plan.rate(step))
        own = float(adapter.to_numpy(self._exact.train_step(group)).mean())
        return float(np.mean(adapter.allgather_object(own, self._mesh.data, name="parity.loss")))

    def _probe_batches(self) -> Iterator[tuple[int, Batch]]:
        for number, group in itertools.islice(self._groups(), SINGLE_BATCHES):
            yield number, group[0]

    def _single_errors(self) -> tuple[float, list[dict[str, float]]]:
        """Errors of float32 against the reference's float64 at the initial weights, over a few batches.

        Returns the largest error of the logits, and for each batch the gradients' errors by parameter.
        """
        logits: list[float] = []
        gradients: list[dict[str, float]] = []
        for number, batch in self._probe_batches():
            single = self._single.gradients(batch)
            reference = unnamed(load_file(self._part.probe(number)))
            logits.append(error(single.outputs, reference.outputs))
            gradients.append(self._in_network_order(single.own, reference.own))
        return max(logits), gradients

    def _mean_of_own(self, gradients: Gradients) -> dict[str, np.ndarray]:
        """The mean of the ranks' gradients without Horovod's arithmetic: gathered, then averaged by NumPy."""
        adapter, means = self._adapter, {}
        for name, own in gradients.own.items():
            mine = adapter.from_numpy(own.reshape(1, -1))
            flat = adapter.to_numpy(adapter.allgather(mine, self._mesh.data, name=f"parity.{name}"))
            means[name] = flat.mean(axis=0).reshape(own.shape)
        return means

    def _batches(self) -> list[str]:
        """For each rank, the SHA-256 of all its batches."""
        total = hashlib.sha256()
        for _, group in self._groups():
            for batch in group:
                total.update(np.ascontiguousarray(batch.inputs).tobytes())
                total.update(np.ascontiguousarray(batch.targets).tobytes())
        return self._adapter.allgather_object(total.hexdigest(), self._mesh.world, name="parity.batches")

    def _wait(self, what: str) -> None:
        """Wait until rank 0 has written the files that the other ranks read next."""
        self._adapter.allgather_object(None, self._mesh.world, name=f"parity.{what}")

    def _save_state(self, step: int) -> None:
        state = self._exact.state(keep=self._mesh.is_root)
        if state:
            save_arrays(self._part.state(step), state)

    def _evaluation_split(self) -> Split:
        """A few samples, not divisible by the number of ranks, so that an unweighted average is detected."""
        split = self._dataset.val if len(self._dataset.val) else self._dataset.train
        size = self._mesh.data.size
        count = min(len(split), 2 * self._recipe.batch_size * size + 1)
        if size > 1 and count % size == 0:
            count -= 1
        return _FirstOf(split, count)

    def _evaluate(self) -> tuple[dict[str, float], int]:
        """The means of the task's metrics over all ranks, and the number of samples."""
        split, batch_size = self._evaluation_split(), self._recipe.batch_size
        return evaluate(self._adapter, self._exact, self._task.metrics, split, batch_size, self._mesh.data), len(split)

    def _eval_logits(self) -> np.ndarray:
        return self._exact.predict(self._first_batch().inputs)


def _as_dtype_of(own: Arrays, arrays: Arrays) -> Arrays:
    return {name: array.astype(own[name].dtype) if name in own else array for name, array in arrays.items()}


@dataclass(frozen=True)
class _FirstOf:
    split: Split
    length: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray) -> Batch:
        return self.split.batch(indices)


def take_part(adapter: Adapter, script: Script, recipe: Recipe, part: Part, heartbeat: Heartbeat) -> None:
    """Run one rank of `hvdkit parity`, in the part's precision. Raises the same errors as `Participant`."""
    recipe = recipe.model_copy(update={"precision": part.precision})
    setup = start(adapter, script, recipe)
    setup.check_trainable()
    Participant(setup, part, heartbeat).take_part()
    heartbeat.beat("leaving Horovod")
    adapter.shutdown()
