"""What is doubtful about a result: its speed, and lines that its metrics.jsonl lacks. No rank needs it."""

from __future__ import annotations

from pathlib import Path

from hvdkit.results.train import TrainResult, scan_metrics

FEW_STEPS = 5  # fewer measured ones make a speed by chance


def doubts(result: TrainResult) -> list[str]:
    """Warnings about the speed that a result states."""
    lines = []
    if result.first_step == result.steps:
        lines.append(f"{result.unit}/s is of the earlier command, from metrics.jsonl: this one has trained no step")
    elif result.measured_steps < FEW_STEPS:
        count = f"{result.measured_steps} step{'' if result.measured_steps == 1 else 's'}"
        lines.append(f"{result.unit}/s was measured over {count} only; train longer, or give a smaller warmup_steps")
    if result.noisy:
        share = f"{100 * (result.load or 0):.0f} % of this machine's CPU time"
        lines.append(
            f"noisy: other processes used {share}, so {result.unit}/s says little; repeat it on a quiet machine"
        )
        if result.idle_cores is not None and result.threads > max(1.0, result.idle_cores):
            threads = max(1, int(result.idle_cores))
            lines[-1] += (
                f". They left {result.idle_cores:.1f} cores to each rank of {result.threads} threads; threads wait for "
                f"each other, so on a busy machine threads={threads} may be several times faster"
            )
    return lines


def damage(path: Path) -> list[str]:
    """A line if the `metrics.jsonl` of a run with checkpoints is missing, or has lines that cannot be read."""
    if not path.exists():
        return [f"{path}: it is missing, and so are its lines of the earlier steps"]
    damaged = sum(line is None and text.endswith(b"\n") for text, line in scan_metrics(path))
    return [f"{path}: {damaged} damaged line(s) are left out"] if damaged else []
