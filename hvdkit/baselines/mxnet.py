"""MXNet's rivals: Horovod by hand, its own parameter server, and no communication at all."""

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
import numpy as np

from hvdkit.adapters import mxnet as own
from hvdkit.adapters.mxnet import Session
from hvdkit.baselines import base
from hvdkit.baselines.base import Apart, Rival
from hvdkit.baselines.rendezvous import free_port
from hvdkit.core.topology import Topology
from hvdkit.recipe.schema import Loss, Optimizer

_PR_SET_PDEATHSIG = 1
# Kept to the end of the process: a store that is deleted waits for a scheduler which may be gone.
_stores: list[mx.kv.KVStore] = []


class Plain(Rival):
    """As hvd.DistributedTrainer does it: a reduction for each gradient, the first layers' first where several wait.

    The update is the adapter's, by MXNet's kernels: MXNet's own SGD has the learning rate inside the velocity, which is
    another recipe.
    """

    RIVAL = "plain"

    def prepare(
        self,
        model: mx.gluon.Block,
        optimizer: Optimizer,
        loss: Loss,
        compression: str = "none",
        precision: str = "fp32",
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        session.average = _average_one_by_one
        return session


def _average_one_by_one(session: Session) -> None:
    for index, parameter in enumerate(session.parameters):
        gradient = parameter.grad()
        sent, context = session.compressor.compress(gradient)
        hvd.allreduce_(sent, average=True, name=f"{session.group}.{index}", priority=-index)
        if sent is not gradient:
            gradient[:] = session.compressor.decompress(sent, context)


class KvStore(Apart):
    """kvstore `dist_sync`: workers push gradients to a server, which adds them up, and pull the sums.

    Rank 0 starts MXNet's scheduler and one server as its children, which die with it.
    """

    RIVAL = "kvstore"

    def __init__(self, adapter: object) -> None:
        super().__init__(adapter)
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._names = itertools.count()
        self._size, self._rank = 1, 0
        self._exact: set[str] = set()  # keys that the server knows
        self._store: mx.kv.KVStore

    def connect(self, topology: Topology) -> None:
        self._size, self._rank = topology.size, topology.rank
        port = free_port() if topology.is_root else 0
        settings = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": self.meeting.exchange(str(port).encode())[0].decode(),
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
        """This process's and the helpers', to 0.01 s."""
        ticks = 0
        for helper in self._helpers:
            fields = Path(f"/proc/{helper.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime, stime
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def prepare(
        self,
        model: mx.gluon.Block,
        optimizer: Optimizer,
        loss: Loss,
        compression: str = "none",
        precision: str = "fp32",
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        prefix = f"network.{next(self._names)}"
        keys = [f"{prefix}.{index}" for index in range(len(session.parameters))]
        if session.dtype == "float32":
            self._store.init(keys, [mx.nd.zeros(parameter.shape) for parameter in session.parameters])
            session.average = lambda session: self._average(session, keys)
        else:
            session.average = lambda session: self._average_exactly(session, prefix)
        return session

    def _average(self, session: Session, keys: list[str]) -> None:
        gradients = [parameter.grad() for parameter in session.parameters]
        for index, (key, gradient) in enumerate(zip(keys, gradients, strict=True)):
            self._store.push(key, gradient, priority=-index)
            self._store.pull(key, out=gradient, priority=-index)
        for gradient in gradients:
            gradient /= self._size

    def _average_exactly(self, session: Session, prefix: str) -> None:
        """For float64, which the server would add up in float32: each rank's bits travel in pieces of 16, each rank's
        in a place of its own where the others have zeros, and are added up here."""
        gradients = [parameter.grad() for parameter in session.parameters]
        mine = np.concatenate([gradient.asnumpy().ravel() for gradient in gradients])
        pieces = np.zeros((self._size, 4, mine.size), np.float32)
        pieces[self._rank] = [(mine.view(np.uint64) >> np.uint64(16 * part)) & np.uint64(0xFFFF) for part in range(4)]
        if prefix not in self._exact:
            self._exact.add(prefix)
            self._store.init(prefix, mx.nd.zeros(pieces.shape))
        carrier = mx.nd.array(pieces)
        self._store.push(prefix, carrier)
        self._store.pull(prefix, out=carrier)
        bits = carrier.asnumpy().astype(np.uint64)
        whole = sum(bits[:, part] << np.uint64(16 * part) for part in range(4))
        mean = np.ascontiguousarray(whole).view(np.float64).mean(axis=0)
        for gradient in gradients:
            part, mean = mean[: gradient.size], mean[gradient.size :]
            gradient[:] = own.from_numpy(part.reshape(gradient.shape))

    def shutdown(self) -> None:
        mx.nd.waitall()
        super().shutdown()
        for helper in self._helpers:
            helper.kill()
            helper.wait()


def _helper(role: str, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    """MXNet's scheduler or server: importing MXNet in that role is what runs it."""
    rank = os.getpid()

    def die_with_rank() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != rank:
            os._exit(1)

    environment = {**os.environ, **settings, "DMLC_ROLE": role}
    return subprocess.Popen([sys.executable, "-c", "import mxnet"], env=environment, preexec_fn=die_with_rank)


class Independent(base.Independent):
    """Gradients stay where they are."""

    def prepare(
        self,
        model: mx.gluon.Block,
        optimizer: Optimizer,
        loss: Loss,
        compression: str = "none",
        precision: str = "fp32",
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        session.average = lambda _: None
        return session


RIVALS = {"plain": Plain, "kvstore": KvStore, "independent": Independent}
