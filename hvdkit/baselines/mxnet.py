"""MXNet's baselines: Horovod by hand, its own parameter server, and no communication."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import horovod.mxnet as hvd
import mxnet as mx

from hvdkit.adapters.mxnet import MXNet
from hvdkit.baselines import base
from hvdkit.baselines.base import Baseline, WithoutHorovod
from hvdkit.baselines.rendezvous import free_port
from hvdkit.core.group import Group, Mesh, Topology
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Recipe

_PR_SET_PDEATHSIG = 1
_models = itertools.count()  # of keys in the store; all ranks create theirs in the same order
# Kept until the process ends: deleting a store waits for the scheduler, which may have exited.
_stores: list[mx.kv.KVStore] = []
Gradients = dict[str, mx.nd.NDArray]


class OneByOne(Strategy):
    """One allreduce for each gradient; the first layers' gradients have the highest priority."""

    def __init__(self, group: Group, half: bool) -> None:
        self.group = group
        self._half = half

    def average(self, gradients: Gradients) -> Gradients:
        means = {}
        for index, (name, gradient) in enumerate(gradients.items()):
            sent = gradient.astype("float16") if self._half else gradient
            hvd.allreduce_(sent, average=True, name=f"gradients.{index}", priority=-index)
            means[name] = sent.astype(gradient.dtype) if self._half else sent
        return means


class Plain(Baseline, MXNet):
    """Averages gradients like hvd.DistributedTrainer.

    The update is the adapter's, with MXNet's kernels. MXNet's own SGD includes the learning rate in the velocity, which
    is a different recipe.
    """

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return OneByOne(mesh.data, recipe.compression.method == "fp16")


class KeyValue(Strategy):
    """Pushes gradients to a store, which sums them, and pulls the sums.

    The server would sum float64 in float32, so these are exchanged as the rarer tensors are.
    """

    def __init__(self, store: mx.kv.KVStore, mesh: Mesh) -> None:
        self._store, self._group = store, mesh.data
        self._keys: list[str] = []

    def average(self, gradients: Gradients) -> Gradients:
        tensors = list(gradients.values())
        if self.session.dtype != "float32":
            return dict(zip(gradients, self.session.adapter.allreduce(tensors, self._group), strict=True))
        if not self._keys:
            model = next(_models)
            self._keys = [f"model.{model}.{index}" for index in range(len(tensors))]
            self._store.init(self._keys, [mx.nd.zeros(gradient.shape) for gradient in tensors])
        for index, (key, gradient) in enumerate(zip(self._keys, tensors, strict=True)):
            self._store.push(key, gradient, priority=-index)
            self._store.pull(key, out=gradient, priority=-index)
        for gradient in tensors:
            gradient /= self._group.size
        return gradients


class KvStore(WithoutHorovod, MXNet):
    """kvstore `dist_sync`: workers push gradients to a server, which sums them, and pull the sums.

    Rank 0 starts MXNet's scheduler and one server as child processes, which are killed when it exits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._store: mx.kv.KVStore

    def connect(self, topology: Topology) -> None:
        port = free_port() if topology.is_root else 0
        settings = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": self.rendezvous.exchange(str(port).encode())[0].decode(),
            "DMLC_NUM_WORKER": str(topology.size),
            "DMLC_NUM_SERVER": "1",
            "DMLC_INTERFACE": "lo",
        }
        if topology.is_root:
            self._helpers = [_helper(role, settings) for role in ("scheduler", "server")]
        os.environ.update(settings | {"DMLC_ROLE": "worker"})
        self._store = mx.kv.create("dist_sync")
        _stores.append(self._store)

    def cpu_seconds(self) -> float:
        """CPU time of this process, the scheduler and the server, in seconds; resolution 0.01 s."""
        ticks = 0
        for helper in self._helpers:
            fields = Path(f"/proc/{helper.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime, stime
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return KeyValue(self._store, mesh)

    def shutdown(self) -> None:
        mx.nd.waitall()
        super().shutdown()
        for helper in self._helpers:
            helper.kill()
            helper.wait()


def _helper(role: str, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start MXNet's scheduler or server, which importing MXNet in that role runs."""
    rank = os.getpid()

    def die_with_rank() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != rank:
            os._exit(1)

    environment = {**os.environ, **settings, "DMLC_ROLE": role}
    return subprocess.Popen([sys.executable, "-c", "import mxnet"], env=environment, preexec_fn=die_with_rank)


class Independent(base.Independent, MXNet):
    """Gradients are not averaged."""


RIVALS = {"plain": Plain, "kvstore": KvStore, "independent": Independent}
