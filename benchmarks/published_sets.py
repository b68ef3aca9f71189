"""Published runs of many GPUs: predicted from one GPU's speed and the described machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks import anchored
from benchmarks.validation_row import Row
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import step
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import Network
from hvdkit.simulator.predict import point
from hvdkit.simulator.settings import LinkSetting, Settings, applied

MACHINES = anchored.ANCHORS / "clusters"
ERROR = 3.0  # percent, of one GPU's published speed
# What NCCL reaches over one TCP connection, which a single core serves: 2.06 GB/s on a faster network (NCCL 2.3.7 with
# one ring, github.com/NVIDIA/nccl issue 209). NCCL 2.0 had one ring, and so one connection, between two hosts.
CONNECTION_MBIT_PER_S = 16480.0


def pollux() -> Iterator[Row]:
    """ResNet-50 on up to 64 T4s of up to 16 hosts, at uneven placements and three batch sizes."""
    name, cluster = "Pollux, T4", clusters.load(Path("aws-g4dn-12xlarge"))
    rows = anchored.table("pollux_imagenet")
    one = {int(row["batch"]): float(row["step_s"]) for row in rows if row["gpus"] == "1"}
    for row in rows:
        hosts, ranks, batch, seconds = int(row["hosts"]), int(row["gpus"]), int(row["batch"]), float(row["step_s"])
        label = f"{ranks} GPUs on {hosts} hosts, batch {batch}"
        if ranks == 1:
            yield Row(name, label, "ms", 1e3 * seconds, 1e3 * seconds, "calibration")
            continue
        work = anchored.workload("ResNet-50", batch, one[batch])
        settings = Settings(hosts=hosts)
        found = point(Calibration(work, Settings(policy="ddp"), ERROR), cluster, ranks, settings)
        naive = step.period(step.Case(work, Network(cluster, ranks, hosts), "naive"))
        used = "calibration" if ranks == 2 else "validation"
        yield Row(
            name, label, "ms", found.step_ms, 1e3 * seconds, used, found.low_ms, found.high_ms,
            1e3 * one[batch], 1e3 * naive,
        )  # fmt: skip


def horovod() -> Iterator[Row]:
    """Horovod's first published runs, on 4 and on 16 servers of 4 Pascal GPUs, by RDMA and by TCP."""
    roce = clusters.load(Path("p100-roce25"))
    tcp = {"mbit_per_s": CONNECTION_MBIT_PER_S}
    links = {"25 Gbit/s RDMA": {}, "25 Gbit/s TCP": tcp, "40 Gbit/s TCP": tcp}
    for (network, model), counts in anchored.grouped("horovod_2017", "network", "model"):
        asked = {"latency_us": 30.0, **links[network]} if links[network] else {}
        cluster = applied(roce, Settings(link={"roce": LinkSetting(**asked)}))
        yield from scaling("Horovod 2017", f"{model}, {network}", model, 64, counts, cluster, "horovod")


def dlperf() -> Iterator[Row]:
    """ResNet-50 in fp32 on up to 32 V100s, six frameworks, one InfiniBand port a host."""
    cluster = applied(clusters.load(Path("v100-nvlink-ib")), Settings(link={"infiniband": LinkSetting(ports=1)}))
    for (framework, batch), counts in anchored.grouped("dlperf_2020", "framework", "batch_per_gpu"):
        policy = "ddp" if framework == "PyTorch" else "horovod"
        yield from scaling("DLPerf, V100", framework, "ResNet-50", int(batch), counts, cluster, policy)


def csc() -> Iterator[Row]:
    """ResNet-50 at batch 32 on three supercomputers."""
    groups = dict(anchored.grouped("csc_2023", "machine", "precision", "how"))
    for (machine, precision, how), counts in groups.items():
        cluster = clusters.load(MACHINES / f"{machine}.yaml")
        whole = {1: groups[machine, precision, "ddp"][1], **counts}
        label = f"{machine}, {precision}, {how}"
        yield from scaling("CSC 2023", label, "ResNet-50", 32, whole, cluster, how)


def aws() -> Iterator[Row]:
    """ResNet-50 in mixed precision on up to 64 V100s of EC2."""
    counts = {int(row["gpus"]): float(row["images_per_s"]) for row in anchored.table("aws_p3_2018")}
    cluster = clusters.load(Path("aws-p3-16xlarge"))
    yield from scaling("AWS P3 2018", "TensorFlow", "ResNet-50", 256, counts, cluster, "horovod")


def servers() -> Iterator[Row]:
    """Inception V3 with TensorFlow's parameter servers; EC2's p2.xlarge is left out, whose network is not published."""
    places = {"Piz Daint": MACHINES / "piz-daint.yaml", "p2.8xlarge": Path("aws-p2-8xlarge")}
    rows = anchored.table("tensorflow_2017_clusters")
    for machine, place in places.items():
        mine = [row for row in rows if row["machine"] == machine]
        counts = {int(row["gpus"]): float(row["images_per_s"]) for row in mine}
        asked = {int(row["gpus"]): int(row["servers"]) for row in mine}
        cluster = clusters.load(place)
        policy = "central" if cluster.ranks_per_host == 1 else "tensorflow"
        yield from scaling(
            "TensorFlow 2017, clusters", machine, "InceptionV3", 64, counts, cluster, policy, servers=asked
        )


def scaling(
    name: str,
    label: str,
    model: str,
    batch: int,
    counts: Mapping[int, float],
    cluster: Cluster,
    policy: str,
    servers: Mapping[int, int] | None = None,
    baseline: Callable[[int], float | None] = lambda ranks: None,
) -> Iterator[Row]:
    """Images per second of many GPUs from those of one; `baseline` gives another model's seconds per step."""
    work = anchored.workload(model, batch, batch / counts[1])
    calibration = Calibration(work, Settings(policy=policy), ERROR)
    yield Row(name, f"{label}, 1 GPU", "images/s", counts[1], counts[1], "calibration")
    for ranks, speed in counts.items():
        if ranks == 1:
            continue
        asked = Settings(servers=(servers or {}).get(ranks, 1))
        found = point(calibration, cluster, ranks, asked)
        naive = step.period(step.Case(work, Network(cluster, ranks), "naive"))
        other_s = baseline(ranks)
        yield Row(
            name, f"{label}, {ranks} GPUs", "images/s", found.images_per_second, speed, "validation",
            1e3 * ranks * batch / found.high_ms, 1e3 * ranks * batch / found.low_ms, ranks * counts[1],
            ranks * batch / naive, other_s and ranks * batch / other_s,
        )  # fmt: skip


SETS = (horovod, dlperf, csc, aws, servers, pollux)
