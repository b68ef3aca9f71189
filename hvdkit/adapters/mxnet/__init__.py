"""Apache MXNet (Gluon) behind the seam (`hvdkit/core/seam.py`)."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

# Before Horovod, which lays MXNet's symbols open to all: Pillow must find its own libjpeg, not the one inside of MXNet.
with contextlib.suppress(ImportError):
    import PIL._imaging  # noqa: F401 - for the library that it loads

import horovod
import horovod.mxnet as hvd
import mxnet as mx
import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.adapters.collectives import Collectives
from hvdkit.adapters.mxnet import state as mxnet_state
from hvdkit.adapters.mxnet import tensors
from hvdkit.adapters.mxnet import timing as observing
from hvdkit.adapters.mxnet.update import Updater
from hvdkit.core import trace_events
from hvdkit.core import trainer as loop_
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import Adapter, Averaging, Gradients, Observer, peeking
from hvdkit.core.topology import Topology, threads_per_rank, wants_gpu
from hvdkit.core.update_rules import clip
from hvdkit.data.batches import Batch
from hvdkit.data.dataset import on_device
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, Optimizer
from hvdkit.strategies.codecs import cast as compression_
from hvdkit.strategies.codecs.cast import Compressor

NAME = "mxnet"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]

_context = mx.cpu()
_sessions = itertools.count()  # ranks prepare their networks in the same order

# Those of the seam's functions that are written in files of their own.
_collectives = Collectives(hvd, lambda splits: mx.nd.array(splits, dtype="int32"))
allreduce, allgather, broadcast = _collectives.allreduce, _collectives.allgather, _collectives.broadcast
alltoall, reducescatter = _collectives.alltoall, _collectives.reducescatter
allgather_object, process_set = _collectives.allgather_object, _collectives.process_set
watch_hosts = _collectives.watch_hosts
broadcast_state, state, load_state = mxnet_state.broadcast_state, mxnet_state.state, mxnet_state.load_state
weights, set_weights = mxnet_state.weights, mxnet_state.set_weights


@dataclass
class Session:
    """The seam's `Session`: a network and what trains it."""

    model: mx.gluon.Block
    optimizer: Updater
    settings: Optimizer
    dtype: str  # of parameters and images
    criterion: mx.gluon.loss.SoftmaxCrossEntropyLoss
    label_smoothing: float
    compressor: Compressor
    parameters: list[mx.gluon.Parameter]  # the trainable ones
    # Names the reduction: two networks may have theirs under way at once, as the engine runs all that is ready.
    group: str
    average: Callable[[Session], None]  # makes the gradients their means over all ranks
    averaging: Averaging | None = None  # what it does so by, where not by Horovod's own reduction
    pools: dict[int, Any] = field(default_factory=dict)  # of images that stay on the device


def versions() -> dict[str, str]:
    return {"framework": mx.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None) -> Topology:
    global _sessions
    topology = _collectives.start()
    _sessions = itertools.count()  # a rank that joins an elastic run counts from the beginning too
    return placed(topology, device, threads)


def placed(topology: Topology, device: str, threads: int | None) -> Topology:
    """Pin the rank that stands there to its device and threads, as `init` does."""
    global _context
    mx.base.check_call(mx.base._LIB.MXSetNumOMPThreads(threads_per_rank(threads, topology.local_size)))
    if wants_gpu(device, mx.context.num_gpus(), topology.local_size, "MXNet"):
        _context = mx.gpu(topology.local_rank)
    return replace(topology, device=_context.device_type)


def shutdown() -> None:
    mx.nd.waitall()  # the engine may still be at a collective
    hvd.shutdown()


def seed(value: int) -> None:
    mx.random.seed(value)


def synchronize() -> None:
    mx.nd.waitall()


def from_numpy(array: np.ndarray) -> mx.nd.NDArray:
    return mx.nd.array(array, ctx=_context, dtype=array.dtype)


def to_numpy(tensor: mx.nd.NDArray) -> np.ndarray:
    return np.asarray(tensor.asnumpy())


def dtype(tensor: mx.nd.NDArray) -> str:
    return str(np.dtype(tensor.dtype).name)


def cast(tensor: mx.nd.NDArray, dtype: str) -> mx.nd.NDArray:
    return tensor.astype(dtype)


def prepare(
    model: mx.gluon.Block,
    optimizer: Optimizer,
    loss: Loss,
    compression: str = "none",
    precision: str = "fp32",
    averaging: Averaging | None = None,
) -> Session:
    dtype = PRECISIONS[precision].parameters
    model.cast(dtype)
    _initialize(model)
    model.hybridize(static_alloc=True, static_shape=True)
    trained = [parameter for parameter in model.collect_params().values() if parameter.grad_req != "null"]
    return Session(
        model,
        Updater(optimizer, trained, tensors),
        optimizer,
        dtype,
        mx.gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=loss.label_smoothing == 0),
        loss.label_smoothing,
        compression_.make(compression, _this()),
        trained,
        f"gradients.{next(_sessions)}",
        _average_gradients if averaging is None else _average_otherwise,
        averaging,
    )


def _initialize(model: mx.gluon.Block) -> None:
    """Draw what the network's author has not, and move all to the device."""
    parameters = model.collect_params()
    shapeless = [name for name, parameter in parameters.items() if not np.prod(parameter.shape or 0)]
    if shapeless:
        raise RequestError(
            f"network: expected the shapes of all parameters, got none for {', '.join(shapeless)}; "
            "give these layers their in_units or in_channels"
        )
    for parameter in parameters.values():
        if parameter._data is None:
            parameter.initialize(ctx=_context)
    parameters.reset_ctx(_context)


def train_step(session: Session, batches: Sequence[Batch]) -> mx.nd.NDArray:
    gradients = [parameter.grad() for parameter in session.parameters]
    losses: list[mx.nd.NDArray] = []
    sums: list[Any] = [0.0] * len(gradients)
    # Not by grad_req "add": each change of it, as for an epoch's shorter last update, makes new gradients.
    for batch in batches[:-1]:
        losses.append(_backward(session, batch)[1])
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
    losses.append(_backward(session, batches[-1])[1])
    if len(batches) > 1:
        for total, gradient in zip(sums, gradients, strict=True):
            gradient[:] = (total + gradient) / len(batches)
    session.average(session)
    if session.settings.clip_norm is not None:
        gradients = clip(gradients, session.settings.clip_norm, tensors)
    session.optimizer.update(gradients)
    observing.mark(trace_events.UPDATED, [parameter.data() for parameter in session.parameters])
    return mx.nd.concat(*losses, dim=0).mean() if len(losses) > 1 else losses[0]


def gradients(session: Session, batch: Batch) -> Gradients:
    logits, loss = _backward(session, batch)
    own = mxnet_state.gradients(session)
    with peeking(session.averaging):
        session.average(session)
    return Gradients(to_numpy(logits), float(loss.asscalar()), own, mxnet_state.gradients(session))


def _backward(session: Session, batch: Batch) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Set the gradients to those of one batch; returns logits and mean loss."""
    trace_events.mark(trace_events.BEGIN)
    images = on_device(batch, session.pools, partial(_images, session), _pick)
    trace_events.mark(trace_events.INPUTS)
    # A network whose batch norms keep their own running statistics is told where a batch begins and ends.
    before = getattr(session.model, "before_step", None)
    if before:
        before(images)
    with mx.autograd.record():
        logits = session.model(images)
        loss = session.criterion(logits, _labels(session, batch.labels, logits.shape[1])).mean()
    observing.mark(trace_events.FORWARD, [logits])  # not the loss: backward needs none, and may come before it
    loss.backward()
    observing.mark_gradients(session.parameters)
    if before:
        session.model.after_step()
    for parameter in session.parameters:
        weight = parameter.data()
        if not weight._fresh_grad:  # unused in this batch, maybe not in the last one or on other ranks
            parameter.grad()[:] = 0
        weight._fresh_grad = False
    return logits, loss


def _average_gradients(session: Session) -> None:
    gradients = [parameter.grad() for parameter in session.parameters]
    packed = [session.compressor.compress(gradient) for gradient in gradients]
    observing.mark(trace_events.SENT, [sent for sent, _ in packed])
    hvd.grouped_allreduce_([sent for sent, _ in packed], op=hvd.Average, name=session.group)
    observing.mark(trace_events.RECEIVED, [sent for sent, _ in packed])
    for gradient, (sent, context) in zip(gradients, packed, strict=True):
        if sent is not gradient:
            gradient[:] = session.compressor.decompress(sent, context)
    observing.mark(trace_events.REDUCED, gradients)


def _average_otherwise(session: Session) -> None:
    assert session.averaging is not None
    gradients = {name: parameter.grad() for name, parameter in mxnet_state.trained(session).items()}
    for name, mean in session.averaging(gradients).items():
        if mean is not gradients[name]:
            gradients[name][:] = mean
    observing.mark(trace_events.REDUCED, list(gradients.values()))


def _labels(session: Session, labels: np.ndarray, classes: int) -> mx.nd.NDArray:
    smoothing, tensor = session.label_smoothing, from_numpy(labels)
    if smoothing == 0:
        return tensor
    return mx.nd.one_hot(tensor, classes, dtype=session.dtype) * (1 - smoothing) + smoothing / classes


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    return to_numpy(session.model(_images(session, images)))


def set_learning_rate(session: Session, value: float) -> None:
    session.optimizer.rate = value


def fit(session: Session, loop: loop_.Loop) -> None:
    loop_.drive(_this(), session, loop)


def observer(session: Session) -> Observer:
    names = {parameter.name: name for name, parameter in mxnet_state.trained(session).items()}
    return observing.Observer(hvd, [names[parameter.name] for parameter in session.parameters])


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _pick(pool: mx.nd.NDArray, indices: np.ndarray) -> mx.nd.NDArray:
    return mx.nd.take(pool, mx.nd.array(indices, ctx=_context, dtype=np.int64))


def _images(session: Session, images: np.ndarray) -> mx.nd.NDArray:
    """NHWC to NCHW on the device; features of another shape as they are."""
    if images.ndim == 4:
        images = images.transpose(0, 3, 1, 2)
    dtype = session.dtype if np.issubdtype(images.dtype, np.floating) else images.dtype
    return from_numpy(np.ascontiguousarray(images, dtype))
