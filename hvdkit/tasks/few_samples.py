"""Batch norm by few samples: what is said before a run."""

from __future__ import annotations

from hvdkit.tasks import resnet

# Below 16 samples a device errors rise: ResNet-50 on ImageNet has 23.6 % with 32, 23.7 % with 16, 24.8 % with 8, 27.3 %
# with 4 and 34.7 % with 2 (Wu and He 2018, Group Normalization, table 2).
FEW = 16


def warning(model: str, batch_norm: str | None, batch_size: int, ranks: int) -> list[str]:
    """A line if a model's local batch norms see few samples on each of several ranks, and would see more of all."""
    if model not in resnet.NAMES or batch_norm == "synchronized" or ranks < 2 or batch_size >= FEW:
        return []
    samples = "1 sample" if batch_size == 1 else f"{batch_size} samples"
    return [
        f"batch norm: a rank's statistics are of {samples}, and accuracy suffers below {FEW} (Wu and He "
        "2018, Group Normalization); give model.batch_norm=synchronized, or a larger batch_size"
    ]
