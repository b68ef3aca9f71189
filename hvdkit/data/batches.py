"""Batches in an order that depends only on (seed, epoch), so that every framework gets the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator

import numpy as np

from hvdkit.data import Shard, check_classes, small_images
from hvdkit.data.dataset import ArraySplit as ArraySplit  # users import it from here
from hvdkit.data.dataset import Augmentation, Batch, BatchedSplit, Dataset, PoolSplit, SharedSplit, Split, StreamedSplit
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import AnyData, Cifar10, Digits, ImageFolder, Mnist5k, OwnData, Synthetic, SyntheticText, Text


def open_dataset(data: AnyData, classes: int, seed: int, shard: Shard | None = None, batch_size: int = 1) -> Dataset:
    """The recipe's data set. Raises RequestError if the model has too few classes, or files are missing or wrong.

    Data sets that read ahead or divide the samples themselves need `shard` and `batch_size`.
    """
    dataset = _open(data, classes, seed, shard or Shard(), batch_size)
    check_classes(data.name, dataset.classes, classes)
    return dataset


def _open(data: AnyData, classes: int, seed: int, shard: Shard, batch_size: int) -> Dataset:
    match data:
        case Digits():
            return small_images.digits()
        case Mnist5k():
            return small_images.mnist5k()
        case Cifar10():
            return small_images.cifar10(data)
        case Synthetic():
            return small_images.synthetic(data, classes, seed)
        case OwnData():
            raise RequestError("data.name: expected model.name own, as own needs a script")
        case Text() | SyntheticText():
            raise RequestError(f"data.name: {data.name} needs a model for text, such as model.name gpt2")
    # Most runs need none of these.
    if isinstance(data, ImageFolder):
        from hvdkit.data import imagefolder

        return imagefolder.open_folder(data, seed, shard)
    from hvdkit.data import user_pipeline

    return user_pipeline.open_native(data, user_pipeline.NativeJob(batch_size, classes, seed, shard, data.options))


def epoch_batches(
    split: Split,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int,
    size: int,
    augmentation: str = "none",
    first: int = 0,
) -> Generator[Batch, None, None]:
    """This rank's batches of one epoch, without the incomplete last global batch.

    All ranks use the same permutation of the samples. Global batch k has the samples from k × batch_size × size on, of
    which rank r takes the r-th `batch_size`. So no sample is on two ranks, and two ranks with batches of 32 see
    together what one rank with batches of 64 sees. The first `first` samples of the permutation are skipped: they
    were used before, by any number of ranks. Where each rank has loaded a share of the split, it takes its batches from
    that one, in an order of its own.
    """
    steps = steps_per_epoch(len(split) - first, batch_size, size)
    if isinstance(split, BatchedSplit):
        done = first // (batch_size * size)
        yield from itertools.islice(split.train_batches(epoch, done + steps), done, None)
        return
    if isinstance(split, SharedSplit):
        order, split = split.epoch(seed, epoch, rank), split.mine
        starts = (first // size + step * batch_size for step in range(steps))
    else:
        order = np.random.default_rng([seed, epoch]).permutation(len(split))
        starts = (first + (step * size + rank) * batch_size for step in range(steps))
    runs = (order[start : start + batch_size] for start in starts)
    if isinstance(split, StreamedSplit):
        yield from split.stream(runs, Augmentation(augmentation, seed, epoch))
        return
    if isinstance(split, PoolSplit) and augmentation == "none":
        yield from map(split.pooled, runs)
        return
    if augmentation == "none":
        yield from map(split.batch, runs)
        return
    from hvdkit.data.augment import augment

    for samples in runs:
        batch = split.batch(samples)
        yield Batch(augment(batch.inputs, augmentation, seed, epoch, samples), batch.targets)


def steps_per_epoch(samples: int, batch_size: int, size: int) -> int:
    """The complete global batches in an epoch, each of `batch_size` samples on `size` ranks."""
    return samples // (batch_size * size)


def evaluation_batches(split: Split, batch_size: int, rank: int, size: int) -> Iterator[tuple[Batch, int]]:
    """Every `size`-th batch from number `rank` on, so that the ranks together evaluate each sample exactly once.

    Batch k has the samples from k × `batch_size` on, whatever `size` is: so its outputs have the same bits on any
    number of ranks. Yields (batch, valid), of which only the first `valid` rows count. A short last batch repeats its
    first sample, since some frameworks compile a step for one shape. All ranks get equally many batches, since those
    that share a model's weights compute together: where samples run out, a batch has none that counts.
    """
    if isinstance(split, BatchedSplit):
        yield from split.evaluation_batches()
        return
    if isinstance(split, SharedSplit):  # as many batches as the longest share has
        samples, numbers = len(split.mine), range(-(-max(split.counts) // batch_size))
    else:
        samples, numbers = len(split), range(rank, -(-len(split) // (batch_size * size)) * size, size)
    starts = [number * batch_size for number in numbers]
    ranges = [np.arange(start, max(start, min(start + batch_size, samples))) for start in starts]
    runs = [np.concatenate([own, np.full(batch_size - len(own), own[0] if len(own) else 0)]) for own in ranges]
    batches = split.stream(runs, None) if isinstance(split, StreamedSplit) else map(split.batch, runs)
    for batch, rows in zip(batches, ranges, strict=True):
        yield batch, len(rows)
