"""Faults that are planted in stages and in shares: what they make of gradients, and of weights after a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdkit.core.group import Mesh
from hvdkit.core.pieces import Partition
from hvdkit.core.session import Session
from tests.pipeline.pair import Pair


def planted(framework: str, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of gradients, and after a step, with each fault."""

    def dropped(session: Session) -> None:
        stage: Any = session.pipeline._chunks[0]  # type: ignore[union-attr]
        forward, calls, ops = stage.forward, [], session.adapter

        def once_without_gradients(*inputs: Any) -> Any:
            passed: Any = forward(*inputs)
            calls.append(passed)
            if len(calls) == 2:
                backward = passed.backward
                passed.backward = partial(without, backward)
            return passed

        def without(backward: Callable[[Any], Any], gradient: Any) -> Any:
            sums = session.step.sums
            before = {name: total * 1 for name, total in sums.items()}
            of_inputs, gradients = backward(gradient)
            for name, total in before.items():
                ops.assign(sums[name], total)
            return of_inputs, {name: gradient * 0 for name, gradient in gradients.items()}

        stage.forward = once_without_gradients

    def scaled(session: Session) -> None:
        pipeline: Any = session.pipeline
        send = pipeline._send
        pipeline._send = lambda pair, tensor, batch, name: send(
            pair, tensor * 2 if name == "activation.1" else tensor, batch, name
        )

    def swapped(session: Session) -> None:
        pipeline: Any = session.pipeline
        receive = pipeline._receive
        others = {"gradient.1": "gradient.2", "gradient.2": "gradient.1"}
        pipeline._receive = lambda pair, batch, name: receive(pair, batch, others.get(name, name))

    def untied(session: Session) -> None:
        session.pipeline.share = lambda sums: None  # type: ignore[union-attr, method-assign]

    def by_ranks(session: Session) -> None:
        end = session.step.end
        session.step.end = lambda count: end(count * mesh.pipeline.size)  # type: ignore[method-assign]

    def norm_of_a_stage(session: Session) -> None:
        partition: Any = session.update.partition
        partition.sum_of_squares = lambda norms: Partition.sum_of_squares(partition, norms)

    def without_flush(session: Session) -> None:
        add, ops = session.step.add, session.adapter

        def and_update(gradients: Mapping[str, Any]) -> None:
            add(gradients)
            if mesh.after is None:
                for name, parameter in session.trainable.parameters.items():
                    ops.assign(parameter, parameter - session.step.sums[name] * 0.1)

        session.step.add = and_update  # type: ignore[method-assign]

    faults: dict[str, Callable[[Session], None]] = {
        "no fault": lambda session: None,
        "a microbatch dropped": dropped,
        "gradients of another microbatch": swapped,
        "an activation scaled twice": scaled,
        "tied weights not summed": untied,
        "divided by ranks": by_ranks,
        "norm over one axis": norm_of_a_stage,
        "stale weights": without_flush,
    }
    found = {}
    for name, plant in faults.items():
        pair = Pair(framework, mesh, "1f1b" if name == "stale weights" else "gpipe")
        plant(pair.stages)
        found[name] = pair.step(0) | {f"after {name}": error for name, error in pair.after().items()}
    return found


def shares_with_faults(framework: str, mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of shares in parts of layers, with norms for clipping that are wrong."""
    found = {}
    for name in ("no fault", "norm of a share", "whole ones twice"):
        pair = Pair(framework, mesh, "", shards=True)
        partition: Any = pair.stages.update.partition
        if name == "norm of a share":
            partition._summed = lambda numbers, group: numbers
        elif name == "whole ones twice":
            partition.sum_of_squares = partial(Partition.sum_of_squares, partition)
        found[name] = pair.step(0) | {f"after {name}": error for name, error in pair.after().items()}
    return found
