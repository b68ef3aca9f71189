"""Samples of which each rank has loaded a share of its own (`data: {name: own, shares: true}`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from hvdkit.data import Shard
from hvdkit.data.dataset import BatchedSplit, Dataset, Fingerprint, SharedSplit
from hvdkit.data.fingerprint import joined, of_dataset
from hvdkit.errors import RequestError

SPLITS = {"train": "training", "val": "validation"}


def join(dataset: Dataset, shard: Shard, gather: Callable[[Any], list[Any]]) -> Dataset:
    """The data set of all ranks from this rank's; collective by `gather`, which returns the values of all ranks.

    Validation samples that are the same on all ranks are no shares. Raises RequestError, the same on every rank, if the
    training samples are.
    """
    mine = of_dataset(dataset)
    if shard.size == 1 or isinstance(dataset.train, BatchedSplit):
        return replace(dataset, fingerprints=mine)
    everyone = [
        {name: Fingerprint(**fingerprint) for name, fingerprint in share.items()}
        for share in gather({name: asdict(fingerprint) for name, fingerprint in mine.items()})
    ]
    alike = {name: not any(share[name].other(everyone[0][name]) for share in everyone) for name in SPLITS}
    counts = {name: tuple(share[name].samples for share in everyone) for name in SPLITS}
    if alike["train"] and mine["train"].inputs:
        raise RequestError(
            f"data.shares: expected other training samples on each rank, got the same {counts['train'][0]} on all "
            f"{shard.size}; leave the key out where each rank has all samples, and hvdkit shares them out"
        )
    used = min(counts["train"]) * shard.size
    left_out = sum(counts["train"]) - used
    train = SharedSplit(dataset.train, counts["train"], used, dataset.train)
    note = f"shares: {_counted(counts['train'])} samples for training"
    if left_out:
        note += f", of which an epoch leaves out {left_out}, since the shortest share decides"
    fingerprints = {"train": _of_all([share["train"] for share in everyone]), "val": mine["val"]}
    val = dataset.val
    if not alike["val"]:
        fingerprints["val"] = _of_all([share["val"] for share in everyone])
        val = SharedSplit(val, counts["val"], sum(counts["val"]), dataset.train)
        note += f"; {_counted(counts['val'])} for validation"
    elif len(val):
        note += f"; {len(val)} for validation, which are the same on all ranks and shared out by hvdkit"
    return replace(dataset, train=train, val=val, note=note, fingerprints=fingerprints)


def _counted(counts: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")
    return f"{sum(counts)} ({shown} by rank)"


def _of_all(shares: list[Fingerprint]) -> Fingerprint:
    inputs, targets = joined(share.inputs for share in shares), joined(share.targets for share in shares)
    return Fingerprint(
        sum(share.samples for share in shares), inputs, targets, f"{shares[0].taken} of {len(shares)} shares"
    )
