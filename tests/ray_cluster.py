"""A Ray cluster of two nodes on this machine, each with two CPUs, as a process of its own.

python ray_cluster.py       prints the cluster's address; a line `kill` ends the second node, the input's end both
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    """Hold the cluster until standard input closes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes(timeout=120)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
