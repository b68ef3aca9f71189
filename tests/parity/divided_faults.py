"""What may be wrong where ranks divide a model: faults to plant into stages, and parts of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from hvdkit.core.pieces import Partition
from hvdkit.core.pipeline import Pipeline
from hvdkit.core.stages import Stages
from hvdkit.core.step import Step
from hvdkit.tasks.gpt import GPT

Fault = Callable[[Any, Any], AbstractContextManager[Any]]  # (adapter, recipe module)


def changed(owner: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> Fault:
    """Another method, made of the sound one."""
    return lambda adapter, module: mock.patch.object(owner, name, make(getattr(owner, name)))


def dropped(sound: Callable[..., Any]) -> Callable[..., Any]:
    """Of each second gradients of microbatches nothing is added."""

    def passes(pipeline: Any, batches: Any, to_device: Any, scale: Any, sums: Any, add: Callable[[Any], None]) -> Any:
        calls, kept = [], {}

        def add_some(gradients: Any) -> None:
            calls.append(0)
            if len(calls) % 2:
                add(gradients)
                kept.update({name: total * 1 for name, total in sums.items()})
            else:  # backward may have added some already
                for name, total in kept.items():
                    pipeline._adapter.assign(sums[name], total)

        return sound(pipeline, batches, to_device, scale, sums, add_some)

    return passes


def scaled(sound: Callable[..., Any]) -> Callable[..., Any]:
    """The activations of one microbatch."""
    return lambda pipeline, pair, tensor, batch, name: sound(
        pipeline, pair, tensor * 2 if name == "activation.1" else tensor, batch, name
    )


def by_ranks(sound: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients over the microbatches of all ranks, in place of those of a copy of the model."""

    def passes(pipeline: Any, *how: Any) -> Any:
        loss, count = sound(pipeline, *how)
        return loss, 2 * count

    return passes


def stale(sound: Callable[..., Any]) -> Callable[..., Any]:
    """The weights of the last stage change between microbatches."""

    def add(step: Any, gradients: Any) -> None:
        sound(step, gradients)
        for name, parameter in step._trainable.parameters.items():
            if "ln_f.weight" in name:
                step._adapter.assign(parameter, parameter - 0.1 * step.sums[name])

    return add


def summed(wrong: Callable[..., Any]) -> Fault:
    """After the rows of one MLP, or the second convolution of one block: `wrong(adapter, sound, tensor, …)`."""

    @contextmanager
    def fault(adapter: Any, module: Any) -> Iterator[None]:
        sound = adapter.leave_parts

        def leave(tensor: Any, group: Any, name: str) -> Any:
            if any(part in name for part in ("h.1.mlp.", "layer2.0.")):
                return wrong(adapter, sound, tensor, group, name)
            return sound(tensor, group, name)

        with mock.patch.object(adapter, "leave_parts", leave, create=True):
            yield

    return fault


def off_by_one(adapter: Any, module: Any) -> AbstractContextManager[Any]:
    """Each rank takes its vectors for those of the next tokens."""
    sound = GPT.vocabulary_part.fget
    return mock.patch.object(GPT, "vocabulary_part", property(lambda table: tuple(end + 1 for end in sound(table))))


OF_STAGES: dict[str, Fault] = {
    "tied_weights_not_summed": changed(Pipeline, "share", lambda sound: lambda pipeline, sums: None),
    "microbatch_dropped": changed(Pipeline, "__call__", dropped),
    "activation_scaled": changed(Pipeline, "_send", scaled),
    "norm_of_a_stage": changed(Stages, "sum_of_squares", lambda sound: Partition.sum_of_squares),
    "divided_by_ranks": changed(Pipeline, "__call__", by_ranks),
    "stale_weights": changed(Step, "add", stale),
}
OF_PARTS: dict[str, Fault] = {
    "no_sum_after_rows": summed(lambda adapter, sound, tensor, *how: tensor),
    "sum_too_many": summed(lambda adapter, sound, tensor, *how: adapter.enter_parts(sound(tensor, *how), *how)),
    "vocabulary_off_by_one": off_by_one,
    "norm_of_a_part": changed(
        Partition, "sum_of_squares", lambda sound: lambda partition, norms: sum(norm * norm for norm in norms)
    ),
}
OF_IMAGES = ("microbatch_dropped", "activation_scaled", "no_sum_after_rows", "norm_of_a_part")  # of a ResNet, too
