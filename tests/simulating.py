"""Profiles, workloads and clusters for tests of the simulator, all made up."""

from __future__ import annotations

import math
from typing import Any

from hvdkit.results.profile import Profile
from hvdkit.simulator.cluster import Cluster, read
from hvdkit.simulator.workload import Gradient, Workload
from hvdkit.tasks.resnet import architecture


def workload(model: str = "resnet50", compute_s: float = 0.3, classes: int = 1000, **more: Any) -> Workload:
    """A model whose layers all take equally long: a third forward, two thirds backward."""
    shapes = architecture(model, classes).parameter_shapes()
    each = compute_s / 3 / len(shapes)
    tensors = tuple(
        Gradient(name, name.rpartition(".")[0], shape, 4 * math.prod(shape), 2 * each)
        for name, shape in reversed(shapes.items())
    )
    return Workload(model, 64, tuple((name, each) for name in shapes), tensors, **more)


def cluster(latency_us: float = 10.0, mbit_per_s: float = 8000.0, **more: Any) -> Cluster:
    """One level of links of one rate."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "made-up",
        "device": {"name": "none", "memory_bytes_per_s": 1e18, "launch_us": 0.0},
        "levels": [{"name": "net", "pieces": [{"from_bytes": 0, "latency_us": latency_us, "mbit_per_s": mbit_per_s}]}],
        "software": {"negotiation_us": 0.0, "negotiation_us_per_doubling": 0.0},
    }
    return read(document | more, "cluster")


def profile(np: int = 2, model: str = "resnet20", forward_ms: float = 20.0, backward_ms: float = 40.0) -> Profile:
    """A profile of a run on CPUs whose figures fit together."""
    shapes = architecture(model, 10).parameter_shapes()
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in shapes))
    names = list(reversed(shapes))
    communication = 5.0 if np > 1 else 0.0
    split = {
        "input_ms": _spread(1.0),
        "compute_ms": _spread(forward_ms + backward_ms + 3.0),
        "forward_ms": _spread(forward_ms),
        "backward_ms": _spread(backward_ms),
        "compression_ms": None,
        "update_ms": _spread(3.0),
        "exposed_communication_ms": _spread(communication),
        "negotiation_ms": _spread(0.0),
        "waiting_ms": _spread(0.0),
        "gaps_ms": _spread(1.0),
        "overlapped_communication_ms": _spread(0.0),
        "step_ms": _spread(forward_ms + backward_ms + 5.0 + communication),
    }
    document = {
        "schema_version": 1,
        "hvdkit_version": "0",
        "framework": "local",
        "framework_version": "0",
        "horovod_version": None,
        "recipe": "made-up",
        "settings": {"name": "made-up", "batch_size": 32},
        "model": model,
        "np": np,
        "hosts": 1,
        "launcher": "direct",
        "device": "cpu",
        "processor": "none",
        "threads": 1,
        "batch_size": 32,
        "accumulate": 1,
        "precision": "fp32",
        "compression": "none",
        "measured_steps": 20,
        "tensors": [
            {
                "name": name,
                "shape": list(shapes[name]),
                "dtype": "float32",
                "bytes": 4 * math.prod(shapes[name]),
                "ready_ms": backward_ms * (i + 1) / len(names),
                "layer": name.rpartition(".")[0],
            }
            for i, name in enumerate(names)
        ],
        "layers": [{"name": name, "kind": "conv", "forward_ms": 1.0, "backward_ms": None} for name in layers],
        "step": split,
        "ranks": [
            {"rank": rank, "host": "here", "clock_offset_ms": 0.0, "clock_error_ms": 0.0, "split": split}
            for rank in range(np)
        ],
        "slowest": None,
        "bound": "compute",
        "communications": [],
        "bytes_per_step": 0,
        "latencies": [],
        "link": {
            "interface": None,
            "rated_mbit_per_s": None,
            "measured_mbit_per_s": None,
            "achieved_mbit_per_s": None,
        },
        "tuning": {"cycle_time_ms": 1.0, "fusion_threshold_bytes": 2**26, "cache_capacity": 1024},
        "memory": {
            "parameter_bytes": 10**6,
            "optimizer_bytes": 10**6,
            "peak_rss_mib": 500.0,
            "device_peak_mib": None,
        },
        "cost": None,
    }
    return Profile.model_validate(document)


def _spread(ms: float) -> dict[str, float]:
    return {"mean": ms, "median": ms, "low": ms, "high": ms}
