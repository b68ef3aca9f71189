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
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from hvdkit.baselines.registry import label
from hvdkit.core.metrics import evaluate
from hvdkit.core.pipeline import divided
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Gradients, Session
from hvdkit.core.state import is_statistic
from hvdkit.core.step_plan import StepPlan
from hvdkit.core.tensors import Scalar, Tensor, scalar
from hvdkit.data.dataset import ArraySplit, Batch, arguments
from hvdkit.errors import RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.recipe.communication import Parallel, Uncompressed
from hvdkit.recipe.parallel import microbatches_of
from hvdkit.recipe.schema import Recipe
from hvdkit.worker.parity_trace import (
    Arrays,
    LeaderNumbers,
    ParityPart,
    error,
    errors,
    first_deviation,
    named,
    own,
    save_arrays,
    unequal,
)
from hvdkit.worker.setup import RankScript, Setup, seed_alike, start

if TYPE_CHECKING:
    from hvdkit.heartbeat import Heartbeat

FREE_STEPS = 5  # free-running losses that are compared; later ones diverge chaotically from rounding
# Batches whose float32 gradients are compared. Rounding flips the sign of a few values before a ReLU, and a flip
# changes gradients a thousand times as much as rounding itself. With several batches, every framework has some flips.
SINGLE_BATCHES = 5
_OF_ALL = 1e-6  # the least size that a gradient of a script's model is taken for, over that of all
NO_MEAN_OF_MICROBATCHES = (
    "parity of stages takes the mean of microbatches' gradients, which that of (sum, count) is not"
)


class ComparedRank:
    """One rank of one framework; its methods are collective.

    Gradients are averaged uncompressed at each update by Horovod's own allreduce, whatever the recipe says, as
    compression is not a difference between frameworks.

    Where `axes` divide the recipe's model, each rank of the leader has a whole copy, and trains it on the microbatches
    of a pipeline, one after the other. All ranks of a follower's copy have cross-entropies, by target in evaluation
    mode; these are compared in place of outputs, but for a model of the user's own. That one's weights are drawn anew
    by its code, from the same seed, for each session.

    Raises RequestError as `Setup.session` and `StepPlan` do.
    """

    def __init__(self, setup: Setup, part: ParityPart, heartbeat: Heartbeat, axes: Parallel | None = None) -> None:
        dense = {"compression": Uncompressed(), "sync": None, "allreduce": "ring"}
        recipe = setup.recipe.model_copy(update=dense | {"steps": part.steps, "check_ranks": 0})
        self._setup, self._adapter, self._mesh, self._part = setup, setup.adapter, setup.mesh, part
        self._recipe, self._heartbeat = recipe, heartbeat
        exact, single = (recipe.model_copy(update={"precision": precision}) for precision in (part.precision, "fp32"))
        self._exact = self._session(exact)
        self._single = self._exact if exact == single else self._session(single, "single")
        self._plan = StepPlan(recipe, len(setup.dataset.train), setup.mesh.data.size)
        self._steps = self._plan.total_steps
        self._initial = self._exact.state()
        axes = axes or recipe.parallel
        self._divided, self._parts = axes.divides, 1
        if axes.pipeline > 1 and self._exact.pipeline is None:
            self._parts = microbatches_of(axes, recipe.batch_size)
        self._measures_losses = self._divided and not setup.task.own
        self._order = list(setup.architecture.parameter_shapes())

    def _session(self, recipe: Recipe, *name: str) -> Session:
        if self._setup.task.own:
            seed_alike(self._adapter, recipe)
        return self._setup.session(recipe, self._setup.strategy(recipe, *name))

    def take_part(self) -> None:
        """Write the trace if this rank leads, then compare with it and write the findings.

        Raises RunError if a file cannot be written, FileNotFoundError if there is no trace.
        """
        if self._part.leads:
            self.lead()
        findings = self.follow()
        if self._mesh.is_root:
            path = self._part.findings(label(self._adapter.NAME, self._adapter.rival))
            write_atomic(path, json.dumps(findings, indent=1) + "\n")

    def lead(self) -> None:
        """Write the trace. Raises RunError if the reference's own loss is NaN or infinite."""
        self._order = self._order or list(self._exact.trainable.parameters)
        figures = LeaderNumbers(self._batches(), self._order)
        for number, batch in self._probe_batches():
            self._save(f"probe-{number}", named(self._gradients(self._exact, batch)))
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
        self._exact.load_state(self._state(self._steps))  # rank 0's running statistics everywhere
        figures.metrics, _ = self._evaluate()
        self._save("evaluation", {"logits": self._evaluation_logits()})
        if self._mesh.is_root:
            write_atomic(self._part.folder / "leader.json", json.dumps(asdict(figures)) + "\n")
        self._wait("trace")

    def follow(self) -> dict[str, Any]:
        """Compare with the trace and return the findings; only rank 0's are used."""
        expected = LeaderNumbers(**json.loads((self._part.folder / "leader.json").read_text()))
        batches, probe, self._order = self._batches(), self._load("probe-0"), expected.order

        self._exact.load_state(self._initial)
        exact = self._gradients(self._exact, next(self._groups())[1][0])
        logits_f32, gradients_f32 = self._single_errors()
        applied = errors(exact.averaged, self._mean_of_own(exact))

        losses, after = self._free_run(expected.losses)
        forced = self._forced_steps()

        self._exact.load_state(self._state(self._steps))
        metrics, total = self._evaluate()
        logits = error(self._evaluation_logits(), self._load("evaluation")["logits"])
        initial = unequal(self._initial, self._state(0))
        findings: dict[str, Any] = {
            "framework": self._adapter.NAME,
            "outputs": "cross-entropies" if self._measures_losses else "logits",
            "versions": self._adapter.versions(),
            "steps": self._steps,
            "precision": self._part.precision,
            "exact_sums": "exact-sums" in self._adapter.CAPABILITIES,
            "batches_equal": batches == expected.batches,
            "initial_weights_equal": not initial,
            "logits_f64": error(exact.outputs, probe["logits"]),
            "gradients_f64": self._in_network_order(exact.own, own(probe)),
            "applied_f64": applied,
            "buffers_f64": {name: value for name, value in after.items() if is_statistic(name)},
            "weights_f64": {
                name: value
                for name, value in after.items()
                if not is_statistic(name) and not name.startswith("optimizer.")
            },
            "losses_f64": losses,
            "step_f64": [max(step.values()) for step in forced],
            "step_tensors_f64": forced,
            "evaluation_logits": logits,
            "evaluation_f64": max(logits, *(error(metrics[name], value) for name, value in expected.metrics.items())),
            "logits_f32": logits_f32,
            "gradients_f32": gradients_f32,
            "reference_logits_f32": expected.logits_f32,
            "reference_gradients_f32": expected.gradients_f32,
            "correct": round(metrics.get("accuracy", 0.0) * total),
            "total": total,
        }
        first: tuple[str | None, str | None] = (None, None)
        if self._part.precision != "fp32":  # in which rounding deviates everywhere
            norms = [norm for _, norm in self._setup.architecture.normalized_layers()]
            first = first_deviation(findings, initial, after, norms)
            del findings["step_tensors_f64"]
        return findings | dict(zip(("first_deviation", "likely_cause"), first, strict=True))

    def _free_run(self, expected: list[float]) -> tuple[list[float], dict[str, float]]:
        """Errors of the first losses from the initial weights, and of the state after the first step."""
        self._exact.load_state(self._initial)
        losses: list[float] = []
        after: dict[str, float] = {}
        for step, group in itertools.islice(self._groups(), FREE_STEPS):
            losses.append(error(self._step(step, group), expected[step]))
            after = after or errors(self._exact.state(), self._state(1))
        return losses, after

    def _forced_steps(self) -> list[dict[str, float]]:
        """Errors by tensor after each step; each step starts from the reference's state (teacher forcing)."""
        after = []
        for step, group in self._groups():
            self._exact.load_state(self._state(step))
            self._step(step, group)
            after.append(errors(self._exact.state(), self._state(step + 1)))
        return after

    def _in_network_order(self, got: Arrays, reference: Arrays) -> dict[str, float]:
        """Errors by parameter, in order from the model's input to its output.

        A script's model may have parameters whose gradient is 0 but for rounding, as a bias before a batch norm.
        """
        norms = [np.linalg.norm(array) for array in reference.values()] if self._setup.task.own else []
        unordered = errors(got, reference, _OF_ALL * float(np.linalg.norm(norms)))
        return {name: unordered[name] for name in self._order}

    def _groups(self) -> Iterator[tuple[int, list[Batch]]]:
        """The number of each update and this rank's batches for it."""
        epochs = (self._plan.groups(self._setup.dataset.train, self._mesh.shard, e) for e in range(self._plan.epochs))
        groups = itertools.chain.from_iterable(epochs)
        for step, group in enumerate(itertools.islice(groups, self._steps)):
            self._heartbeat.beat("parity step", step)
            yield step, group

    def _probe_batches(self) -> Iterator[tuple[int, Batch]]:
        for number, group in itertools.islice(self._groups(), SINGLE_BATCHES):
            yield number, group[0]

    def _step(self, step: int, group: list[Batch]) -> float:
        """One update; returns the mean loss over all ranks."""
        self._exact.set_learning_rate(self._plan.rate(step))
        loss = self._exact.train_step([part for batch in group for part in divided(batch, self._parts)])
        own = 0.0 if loss is None else float(self._adapter.to_numpy(loss).mean())
        if self._exact.pipeline is not None:
            (own,) = self._exact.pipeline.from_last([own])
        return float(np.mean(self._adapter.allgather_object(own, self._mesh.data, name="parity.loss")))

    def _gradients(self, session: Session, batch: Batch) -> Gradients:
        """As `Session.gradients`, of a batch or the mean of its microbatches."""
        if not self._divided:
            return session.gradients(batch)
        outputs = self._outputs(session, batch)
        of = _of_stages if session.pipeline and self._adapter.rival is None else type(session).gradients
        results = [of(session, part) for part in divided(batch, self._parts)]
        if session.counting is not None and session.counting.counts:
            raise RequestError(f"loss: {NO_MEAN_OF_MICROBATCHES}; return the mean")

        def mean(arrays: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
            return {name: np.mean([of_batch[name] for of_batch in arrays], axis=0) for name in arrays[0]}

        own, averaged = mean([result.own for result in results]), mean([result.averaged for result in results])
        return Gradients(outputs, float(np.mean([result.loss for result in results])), own, averaged)

    def _single_errors(self) -> tuple[float, list[dict[str, float]]]:
        """Errors of float32 against the reference's float64 at the initial weights, over a few batches.

        Returns the largest error of the logits, and for each batch the gradients' errors by parameter.
        """
        logits: list[float] = []
        gradients: list[dict[str, float]] = []
        for number, batch in self._probe_batches():
            single, probe = self._gradients(self._single, batch), self._load(f"probe-{number}")
            logits.append(error(single.outputs, probe["logits"]))
            gradients.append(self._in_network_order(single.own, own(probe)))
        return max(logits), gradients

    def _mean_of_own(self, gradients: Gradients) -> dict[str, np.ndarray]:
        """The mean of the ranks' gradients without Horovod's arithmetic: gathered, then averaged by NumPy."""
        adapter, means = self._adapter, {}
        for name, array in gradients.own.items():
            mine = adapter.from_numpy(array.reshape(1, -1))
            flat = adapter.to_numpy(adapter.allgather(mine, self._mesh.data, name=f"parity.{name}"))
            means[name] = flat.mean(axis=0).reshape(array.shape)
        return means

    def _batches(self) -> list[str]:
        """For each copy of the model, the SHA-256 of all batches of its ranks, which is one where they are equal."""
        total = hashlib.sha256()
        for _, group in self._groups():
            for batch in group:
                for array in (*arguments(batch.inputs), batch.targets):
                    total.update(np.ascontiguousarray(array).tobytes())
        copy = [total.hexdigest()]
        if self._mesh.model.size > 1:
            copy = self._adapter.allgather_object(copy[0], self._mesh.model, name="parity.batches.model")
        return self._adapter.allgather_object("/".join(dict.fromkeys(copy)), self._mesh.data, name="parity.batches")

    def _wait(self, what: str) -> None:
        """Wait until rank 0 has written the files that the other ranks read next."""
        self._adapter.allgather_object(None, self._mesh.world, name=f"parity.{what}")

    def _save(self, name: str, arrays: Arrays) -> None:
        if self._mesh.is_root:
            save_arrays(self._part.folder / f"{name}.safetensors", arrays)

    def _save_state(self, step: int) -> None:
        self._save(f"state-{step:04}", self._exact.state(keep=self._mesh.is_root))

    def _load(self, name: str) -> dict[str, np.ndarray]:
        return load_file(self._part.folder / f"{name}.safetensors")

    def _state(self, step: int) -> dict[str, np.ndarray]:
        """The reference's complete state after so many steps."""
        return self._load(f"state-{step:04}")

    def _evaluate(self) -> tuple[dict[str, float], int]:
        """The means of the task's metrics over all ranks, and the number of samples.

        These are a few samples, not divisible by the number of ranks, so that an unweighted average is detected.
        """
        dataset, batch_size, data = self._setup.dataset, self._recipe.batch_size, self._mesh.data
        split = dataset.val if len(dataset.val) else dataset.train
        count = min(len(split), 2 * batch_size * data.size + 1)
        count -= data.size > 1 and count % data.size == 0
        batch = split.batch(np.arange(count))
        few = ArraySplit(batch.inputs, batch.targets)
        return evaluate(self._adapter, self._exact, self._setup.task.metrics, few, batch_size, data), count

    def _evaluation_logits(self) -> np.ndarray:
        batch = next(self._groups())[1][0]
        return self._outputs(self._exact, batch)

    def _outputs(self, session: Session, batch: Batch) -> np.ndarray:
        """In evaluation mode, on all ranks of a copy of the model."""
        return session.losses(batch) if self._measures_losses else session.predict(batch.inputs)


def _of_stages(session: Session, batch: Batch) -> Gradients:
    """As `Session.gradients`, of a pipeline: whole ones, and the loss, on all ranks, and no outputs; collective."""
    step, pipeline, ops = session.step, session.pipeline, session.adapter
    assert pipeline
    step.prepare()
    loss, count = pipeline([batch], step.to_device, step.scale, step.sums, session.compiled(step.add))
    pipeline.share(step.sums)
    (mean,) = pipeline.from_last([0.0 if loss is None else float(ops.to_numpy(loss).mean())])

    def averaged(count: Scalar) -> list[dict[str, Tensor]]:
        own = {name: total / scalar(ops, count, total) for name, total in step.sums.items()}
        means = session.strategy.average({name: gradient * 1 for name, gradient in own.items()})
        for total in step.sums.values():
            ops.clear(total)
        return [session.update.unscaled(gradients) for gradients in (own, means)]

    both = [dict(session.update.partition.gather(gradients)) for gradients in session.compiled(averaged)(float(count))]
    own, means = ({name: session.array(tensor) for name, tensor in whole.items()} for whole in both)
    return Gradients(np.zeros(0), mean, own, means)


def take_part(adapter: Adapter, script: RankScript, recipe: Recipe, part: ParityPart, heartbeat: Heartbeat) -> None:
    """Run one rank of `hvdkit parity`, in the part's precision. Raises the same errors as `ComparedRank`."""
    axes = recipe.parallel
    changes = {"precision": part.precision} | ({"parallel": Parallel()} if part.leads else {})
    setup = start(adapter, script, recipe.model_copy(update=changes))
    heartbeat.beat("building the model")
    setup.check_trainable()
    ComparedRank(setup, part, heartbeat, axes).take_part()
    heartbeat.beat("leaving Horovod")
    adapter.shutdown()
