"""A Ray cluster of two nodes on this machine, each with two CPUs, as a process of its own.

python ray_cluster.py [FOLDER]    prints the cluster's address, what `--launcher ray` calls the second node, and the
                                  address of its job server

A line `kill` ends the second node, `add` adds it again if it was; `done` answers. The input's end ends all. The second
node has a FOLDER of its own, which needs root.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

from ray.cluster_utils import Cluster

CLONE_NEWNS = 0x20000


def main() -> None:
    """Hold the cluster until standard input closes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True})
    for folder in sys.argv[1:]:
        # Processes that this thread starts from now on see another file system there.
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    second: Any = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes(timeout=120)
    name = cluster.address.rpartition(":")[0]
    later = second.unique_id > cluster.head_node.unique_id  # both have one address
    print(cluster.address, f"{name}-2" if later else name, cluster.head_node.webui_url, flush=True)
    for line in sys.stdin:
        if line == "kill\n":
            cluster.remove_node(second, allow_graceful=False)
            second = None
        elif second is None:
            second = cluster.add_node(num_cpus=2)
            cluster.wait_for_nodes(timeout=120)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
