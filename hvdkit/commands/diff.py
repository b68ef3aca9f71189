"""What differs between two runs: settings, versions, the first step with another loss, the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import numpy as np

from hvdkit import paths
from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.resume import last_record
from hvdkit.commands.fields import MayWrite
from hvdkit.commands.request import Argument
from hvdkit.errors import Faults, RequestError
from hvdkit.recipe import schema
from hvdkit.results.diff import CheckpointDifference, Diff, Difference, LossDifference, TensorDifference
from hvdkit.results.train import TrainResult, read_metrics

_SHOWN = 8
Scores = tuple[float, dict[str, float] | None]  # the loss and the validation of a line
# Of result.json: what may explain a difference, and is no key of the recipe.
_CIRCUMSTANCES = (
    "framework", "framework_version", "horovod_version", "hvdkit_version", "rival", "np", "launcher", "device",
    "threads", "pinned", "native_pipeline", "first_step", "corrupt_images",
)  # fmt: skip


_Run = Annotated[Path, Argument("the folder of an `hvdkit train`", metavar="RUN")]


class DiffRequest(MayWrite):
    """What differs between two runs: settings, versions, the first step with another loss, weights.

    `same` of the result says whether the training is. Without `out` nothing is written.
    """

    first: _Run
    second: _Run


def run(request: DiffRequest) -> Diff:
    """Compare, and write diff.json where that is asked for."""
    difference = compared(request.first, request.second)
    with request.claimed([request.first, request.second]) as folder:
        return difference.written(folder) if folder else difference


def lines(request: DiffRequest, result: Diff) -> Iterator[str]:
    """What differs, and where it is written."""
    yield from _told(result)
    if request.out:
        yield f"written to {result.folder / result.FILE}"


def status(result: Diff) -> int:
    """1 where the runs differ."""
    return int(not result.same)


def compared(first: Path, second: Path) -> Diff:
    """Compare two folders of `hvdkit train`. Raises RequestError for others, and for damaged files, all at once."""
    faults = Faults()
    for folder in map(paths.settled, (first, second)):
        if not (folder / "config.yaml").is_file():
            what = "it has no config.yaml" if folder.is_dir() else "no such folder"
            faults.append(f"{folder}: {what}; expected the folder of an `hvdkit train`, such as runs/first")
    faults.report()
    lines = [_losses(folder / "metrics.jsonl") for folder in (first, second)]
    shared = sorted(lines[0].keys() & lines[1].keys())
    steps = sorted(set(_checkpoints(first)) & set(_checkpoints(second)))
    return Diff(
        runs=(str(first), str(second)),
        settings=_differences(*map(_settings, (first, second))),
        circumstances=_differences(*map(_circumstances, (first, second))),
        initial_weights=_same_weights((first, second), "initial_state"),
        final_weights=_same_weights((first, second), "final_weights"),
        steps=len({step for step, _ in shared}),
        loss=_loss((step, lines[0][step, end], lines[1][step, end]) for step, end in shared),
        checkpoints=[_weights(step, _checkpoints(first)[step], _checkpoints(second)[step]) for step in steps],
    )


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return schema.flat(schema.load(folder / "config.yaml"))
    except RequestError as error:
        raise RequestError(
            f"{error}; `hvdkit train RECIPE --out {quote(str(folder))} --resume` makes it anew"
        ) from None


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    return [Difference(key=key, first=first.get(key), second=second.get(key)) for key in keys]


def _circumstances(folder: Path) -> dict[str, Any]:
    """As far as they are known: a run that failed has no result, and its last checkpoint says less."""
    if not (folder / "result.json").exists():
        record = last_record(folder / "checkpoints")
        known = ("framework", "framework_version", "hvdkit_version", "np")
        return {} if record is None else {key: getattr(record, key) for key in known}
    result = TrainResult.read(folder / "result.json").model_dump(mode="json")
    tuning = {f"tuning.{name}": setting.get("value") for name, setting in (result.get("tuning") or {}).items()}
    return {key: result.get(key) for key in _CIRCUMSTANCES} | tuning


def _same_weights(folders: tuple[Path, Path], when: str) -> bool | None:
    """Whether the results have the same digest; None where a run has no result."""
    files = [folder / "result.json" for folder in folders]
    if not all(file.exists() for file in files):
        return None
    first, second = (getattr(TrainResult.read(file), f"{when}_sha256") for file in files)
    return bool(first == second)


def _losses(path: Path) -> dict[tuple[int, bool], Scores]:
    """By step and whether it ends an epoch: little of each line, as there may be millions."""
    return {(line.step, line.ends_epoch): (line.loss, line.validation) for line in read_metrics(path)}


def _loss(pairs: Iterable[tuple[int, Scores, Scores]]) -> LossDifference | None:
    """The first difference of a loss or of a validation metric."""
    after = 0
    for step, one, other in pairs:
        mine, theirs = ({"loss": loss} | (validation or {}) for loss, validation in (one, other))
        for key in {**mine, **theirs}:
            if mine.get(key) != theirs.get(key):
                named = key if key == "loss" and one[0] != other[0] else f"validation {key}"
                return LossDifference(step=step, after=after, key=named, first=mine.get(key), second=theirs.get(key))
        after = step
    return None


def _checkpoints(folder: Path) -> dict[int, Path]:
    """A run's checkpoints by their step."""
    found = (folder / "checkpoints").glob("step-*")
    return {int(number): path for path in found if (number := path.name.removeprefix("step-")).isdecimal()}


def _weights(step: int, first: Path, second: Path) -> CheckpointDifference:
    one, other = (snapshots.read(folder).state for folder in (first, second))
    names = sorted({*one, *other})
    differing = [TensorDifference(name=name, **_error(one.get(name), other.get(name))) for name in names
                 if not _same(one.get(name), other.get(name))]  # fmt: skip
    return CheckpointDifference(step=step, tensors=len(names), differing=differing)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether both are there and have the same bits."""
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return one.tobytes() == other.tobytes()


def _error(one: np.ndarray | None, other: np.ndarray | None) -> dict[str, float | None]:
    unknown = dict.fromkeys(("relative_error", "largest"))
    if one is None or other is None or one.shape != other.shape:
        return unknown
    reference = one.astype(np.float64)
    apart = other.astype(np.float64) - reference
    norm = float(np.linalg.norm(reference))
    errors = {
        "relative_error": float(np.linalg.norm(apart)) / norm if norm else None,
        "largest": float(np.abs(apart).max(initial=0.0)),
    }
    finite = all(value is None or np.isfinite(value) for value in errors.values())
    return errors if finite else unknown


def _told(diff: Diff) -> list[str]:
    """The differences in the order in which they may cause each other, then what to look at."""
    shown = [*_keys("settings", diff.settings), *_keys("versions and ranks", diff.circumstances)]
    if diff.initial_weights is not None:
        shown.append(f"initial weights: {'the same' if diff.initial_weights else 'they differ'}")
    shown.append(_loss_line(diff))
    changed = [pair for pair in diff.checkpoints if pair.differing]
    if changed:
        shown += _weight_lines(changed[0])
        if changed[-1] is not changed[0]:
            shown += _weight_lines(changed[-1])
    elif diff.checkpoints:
        steps = ", ".join(str(pair.step) for pair in diff.checkpoints)
        shown.append(f"weights: the same to the last bit at step {steps}")
    else:
        final = {True: "; the final weights are the same", False: "; the final weights differ", None: ""}
        shown.append(f"weights: no checkpoint of the same step in both{final[diff.final_weights]}")
    return [*shown, *_advice(diff)]


def _keys(title: str, differences: list[Difference]) -> list[str]:
    if not differences:
        return [f"{title}: the same"]
    return [f"{title}:", *(f"  {key.key}: {key.first} → {key.second}" for key in differences)]


def _loss_line(diff: Diff) -> str:
    if not diff.steps:
        return "loss: no logged step in both"
    loss = diff.loss
    if loss is None:
        return f"loss: the same at all {diff.steps} logged steps"
    between = f"the same at step {loss.after}, " if loss.after else ""
    return f"loss: {between}{loss.key} differs first at step {loss.step}: {loss.first!r} → {loss.second!r}"


def _weight_lines(checkpoint: CheckpointDifference) -> list[str]:
    worst = sorted(checkpoint.differing, key=lambda tensor: -(tensor.relative_error or 0.0))
    title = f"weights: {len(worst)} of {checkpoint.tensors} tensors differ at step {checkpoint.step}; relative error"
    rows = [
        f"  {tensor.name}: {'unknown' if tensor.relative_error is None else f'{tensor.relative_error:.2g}'}"
        for tensor in worst[:_SHOWN]
    ]
    return [title, *rows, *(["  …"] if len(worst) > _SHOWN else [])]


def _advice(diff: Diff) -> list[str]:
    """What to look at next."""
    if diff.same:
        return []
    if diff.settings or diff.circumstances:
        return ["next: make the settings and versions above the same, one by one"]
    hints = ["next: nothing that was recorded explains it: docs/troubleshooting.md#two-runs-differ"]
    if diff.loss is not None and diff.loss.step > diff.loss.after + 1:
        hints.append(
            f"with log_every=1 both runs show the first of the steps {diff.loss.after + 1} to {diff.loss.step}"
        )
    return hints
