"""What `hvdkit diff` has found, as lines."""

from __future__ import annotations

from hvdkit.results.diff import CheckpointDifference, Diff, Difference

_SHOWN = 8


def lines(diff: Diff) -> list[str]:
    """The differences in the order in which they may cause each other, then what to look at."""
    shown = [*_keys("settings", diff.settings), *_keys("versions and ranks", diff.circumstances)]
    if diff.initial_weights is not None:
        shown.append(f"initial weights: {'the same' if diff.initial_weights else 'they differ'}")
    shown.append(_losses(diff))
    changed = [pair for pair in diff.checkpoints if pair.differing]
    if changed:
        shown += _weights(changed[0])
        if changed[-1] is not changed[0]:
            shown += _weights(changed[-1])
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


def _losses(diff: Diff) -> str:
    if not diff.steps:
        return "loss: no logged step in both"
    loss = diff.loss
    if loss is None:
        return f"loss: the same at all {diff.steps} logged steps"
    between = f"the same at step {loss.after}, " if loss.after else ""
    return f"loss: {between}{loss.key} differs first at step {loss.step}: {loss.first!r} → {loss.second!r}"


def _weights(checkpoint: CheckpointDifference) -> list[str]:
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
    hints = ["next: nothing that was recorded explains it: docs/debugging.md#two-runs-differ"]
    if diff.loss is not None and diff.loss.step > diff.loss.after + 1:
        hints.append(
            f"with log_every=1 both runs show the first of the steps {diff.loss.after + 1} to {diff.loss.step}"
        )
    return hints
