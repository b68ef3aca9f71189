"""`hvdkit profile --batch-sizes`: compute that is not proportional to the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hvdkit.profiling import batch_curves
from hvdkit.report.profile import sentences
from hvdkit.results.profile import Profile
from hvdkit.simulator import predict as predicting
from hvdkit.simulator.settings import read
from hvdkit.simulator.workload import of_profile
from tests import simulating

pytestmark = pytest.mark.check

many = settings(max_examples=50)
LAYERS = len(simulating.profile(np=1).layers)


def profile(*batches: tuple[int, float]) -> Profile:
    """A profile at batch size 32 whose forward and backward take 60 ms."""
    document = simulating.profile(np=1).model_dump(mode="json")
    return Profile.model_validate(document | {"batches": [{"batch_size": b, "compute_ms": ms} for b, ms in batches]})


def test_measured_batch_sizes_are_interpolated_and_go_on_along_the_last_two() -> None:
    measured = profile((8, 30.0), (16, 40.0), (32, 60.0))
    fixed = 5.0  # update, input and gaps of `simulating.profile`

    def found(batch: int) -> predicting.Point:
        return predicting.predict(measured, simulating.cluster(), [1], read([f"batch_size={batch}"])).points[0]

    for batch, ms in ((8, 30), (12, 35), (16, 40), (32, 60), (64, 100), (4, 25)):
        assert found(batch).step_ms == pytest.approx(ms + fixed), batch
    inside, outside = found(16), found(64)
    assert inside.high_ms / inside.low_ms < outside.high_ms / outside.low_ms
    assert not any("batch size" in told for told in inside.warnings)
    assert any("batch size 64 was not measured" in told for told in outside.warnings)
    # one batch size is far less sure
    one = predicting.predict(profile(), simulating.cluster(), [1], read(["batch_size=8"])).points[0]
    assert one.high_ms / one.low_ms > 1.5 * found(8).high_ms / found(8).low_ms


def test_batches_that_cannot_be_are_refused() -> None:
    for batches in (((16, 1.0), (8, 2.0), (32, 3.0)), ((8, 1.0), (16, 2.0)), ((8, 50.0), (32, 10.0)), ((32, -1.0),)):
        with pytest.raises(ValidationError, match="batches"):
            profile(*batches)


# -- a curve a layer --------------------------------------------------------------------------------------------------


def at(batch: int, forward: list[float], backward: list[float]) -> Profile:
    """A run at one batch size, whose layers take so many ms of forward, and of backward in its order."""
    document = simulating.profile(1, "resnet20", sum(forward), sum(backward)).model_dump(mode="json")
    for layer, ms in zip(document["layers"], forward, strict=True):
        layer["forward_ms"] = ms
    names = list(dict.fromkeys(tensor["layer"] for tensor in document["tensors"]))
    ends = dict(zip(names, np.cumsum(backward).tolist(), strict=True))
    for tensor in document["tensors"]:
        tensor["ready_ms"] = ends[tensor["layer"]]  # a layer's gradients are ready together
    document["batch_size"] = document["settings"]["batch_size"] = batch
    return Profile.model_validate(document)


def small_and_large() -> tuple[Profile, list[Profile]]:
    """Batches of 8 and of 16; all layers take twice as long for the larger one."""
    return at(8, [1.0] * LAYERS, [1.0] * LAYERS), [at(16, [2.0] * LAYERS, [2.0] * LAYERS)]


@st.composite
def runs(draw: st.DrawFn) -> list[Profile]:
    """Of one recipe at two to four batch sizes; each layer has a fixed part, a part for each sample, and noise."""
    sizes = sorted(draw(st.sets(st.integers(1, 256), min_size=2, max_size=4)))
    times = st.lists(st.floats(0, 2), min_size=LAYERS, max_size=LAYERS)
    fixed, each = draw(times), [ms / 16 for ms in draw(times)]
    noise = draw(st.lists(st.floats(0.9, 1.1), min_size=2 * LAYERS, max_size=2 * LAYERS))
    return [
        at(size, *np.split(np.array([0.01 + (f + size * e) * (n if i % 2 else 1 / n) for f, e, n in every]), 2))
        for i, size in enumerate(sizes)
        for every in [list(zip(2 * fixed, 2 * each, noise, strict=True))]
    ]


def alone(profile: Profile, batch: int) -> predicting.Point:
    return predicting.predict(profile, simulating.cluster(), [1], read([f"batch_size={batch}"])).points[0]


def rising(found: list[Profile]) -> bool:
    times = [each.step.compute_ms.mean for each in found]
    return times == sorted(times)


@given(runs(), st.integers(0, 3))
@many
def test_each_measured_batch_size_is_reproduced_layer_by_layer(found: list[Profile], place: int) -> None:
    own = found[place % len(found)]
    both = batch_curves.combined(own, [each for each in found if each is not own])
    work = of_profile(both)
    for each in found if rising(found) else [own]:
        parts, own_parts = work.parts(each.batch_size / own.batch_size), of_profile(each).parts(1.0)
        assert parts.forward == pytest.approx(own_parts.forward)
        assert parts.segments == pytest.approx(own_parts.segments)
        assert alone(both, each.batch_size).step_ms == pytest.approx(each.step.step_ms.mean)
    assert Profile.model_validate_json(both.model_dump_json()) == both


@given(runs(), st.floats(0.01, 20), st.floats(1, 20))
@many
def test_times_rise_with_the_batch_and_layers_sum_up_to_the_step(found: list[Profile], low: float, more: float) -> None:
    work = of_profile(batch_curves.combined(found[0], found[1:]))
    small, large = work.parts(low), work.parts(low * more)
    assert small.whole_s <= large.whole_s * (1 + 1e-9)
    assert min(small.segments.min(), small.forward.min(), small.tail_s) >= 0
    whole = math.fsum([*small.forward, *small.segments, small.tail_s, small.earlier_s])
    assert whole == pytest.approx(small.whole_s) == pytest.approx(work.compute_factor(low) * work.compute_s)


def test_layers_that_do_not_grow_leave_the_others_more_of_a_larger_batch() -> None:
    """Half of the layers take 1 ms at any batch size, the others 1 ms for each 8 samples."""
    kind = [i % 2 for i in range(LAYERS)]
    found = [at(size, *[[size / 8 if grows else 1.0 for grows in kind]] * 2) for size in (8, 16, 32)]
    both = batch_curves.combined(found[1], [found[0], found[2]])
    for fit in (fit for layer in both.layers for fit in (layer.forward_fit, layer.backward_fit)):
        assert fit is not None and fit.residual_percent == pytest.approx(0, abs=1e-9)
    fits = [layer.forward_fit for layer in both.layers if layer.forward_fit]
    assert [each.per_sample_ms for each in fits] == pytest.approx([grows / 8 for grows in kind])
    assert [each.fixed_ms for each in fits] == pytest.approx([1.0 - grows for grows in kind])
    grow = sum(kind)  # at 16: 2 ms each, of forward and of backward
    text = (
        f"by batch size, 8, 16, 32: {2.0 * (LAYERS - grow):.1f} ms and {grow / 4:.3g} ms for each sample, within 0.0 %"
    )
    assert any(text in line for line in sentences(both))
    work = of_profile(both)
    for size in (1, 4, 12, 24, 64, 256):
        expected = [max(size / 8, 0) * 1e-3 if grows else 1e-3 for grows in kind]
        if size < 8:  # no faster than in proportion
            expected = [size / 8 * 1e-3 if grows else 1e-3 for grows in kind]
        assert work.parts(size / 16).forward == pytest.approx(expected), size
    # The curve of the whole step alone scales all layers alike.
    whole = both.model_copy(
        update={"batches": [each.model_copy(update={"tensor_ready_ms": []}) for each in both.batches]}
    )
    alike = of_profile(whole).parts(2.0)
    assert alike.whole_s == pytest.approx(work.parts(2.0).whole_s)
    assert alike.forward.std() < work.parts(2.0).forward.std()


def test_a_workload_that_is_made_from_another_has_times_of_its_own() -> None:
    work = of_profile(batch_curves.combined(*small_and_large()))
    factor = work.parts(2.0).whole_s / work.compute_s
    slower = replace(
        work,
        forward=tuple((name, 3 * seconds) for name, seconds in work.forward),
        tensors=tuple(replace(tensor, segment_s=3 * tensor.segment_s) for tensor in work.tensors),
    )
    assert slower.parts(1.0).whole_s == pytest.approx(3 * work.compute_s)
    assert slower.parts(2.0).whole_s == pytest.approx(3 * work.compute_s * factor)


def test_gradients_that_become_ready_in_another_order_are_ready_together() -> None:
    small, (large,) = small_and_large()
    turned = large.model_copy(update={"tensors": large.tensors[::-1]})
    times = [each.ready_ms for each in large.tensors]
    turned = turned.model_copy(
        update={"tensors": [t.model_copy(update={"ready_ms": ms}) for t, ms in zip(turned.tensors, times, strict=True)]}
    )
    both = batch_curves.combined(small, [turned])
    assert Profile.model_validate_json(both.model_dump_json()).batches[1].tensor_ready_ms[0] == times[-1]
    assert of_profile(both).parts(2.0).whole_s == pytest.approx(2 * of_profile(both).compute_s)


def test_a_layer_whose_forward_is_not_known_at_all_sizes_has_no_curve_of_it() -> None:
    small, (large,) = small_and_large()
    unknown = [layer.model_copy(update={"forward_ms": None}) for layer in large.layers]
    both = batch_curves.combined(small, [large.model_copy(update={"layers": unknown})])
    assert not both.batches[0].layer_forward_ms and both.layers[0].forward_fit is None
    assert of_profile(both).parts(2.0).forward_s == pytest.approx(2e-3 * LAYERS)


def test_times_of_layers_that_cannot_be_are_refused() -> None:
    found = [at(size, [size / 8] * LAYERS, [size / 8] * LAYERS) for size in (8, 16)]
    whole = batch_curves.combined(found[0], found[1:]).model_dump(mode="json")

    def damaged(**changes: Any) -> dict[str, Any]:
        return whole | {"batches": [whole["batches"][0] | changes, whole["batches"][1]]}

    rest = whole["batches"][0]["tensor_ready_ms"][1:]
    for changes, match in (
        ({"tensor_ready_ms": rest}, "tensor_ready_ms: expected 65 times, got 64"),
        ({"tensor_ready_ms": [*rest[::-1], 0.0]}, "do not fall"),
        ({"tensor_ready_ms": []}, "at each batch size or at none"),
        ({"layer_forward_ms": [1.0]}, "layer_forward_ms: expected"),
        ({"layer_forward_ms": [-1.0] * LAYERS}, "layer_forward_ms"),
        ({"backward_ms": -1.0}, "backward_ms"),
    ):
        with pytest.raises(ValidationError, match=match):
            Profile.model_validate(damaged(**changes))
