"""What one device's figure leaves out: by how much steps get longer as ranks fill a host, and then several hosts.

On GPUs, the ranks of a host share its cores, memory and power; collectives take multiprocessors and memory from
backward; hosts that have more to do launch kernels and read inputs later; and nothing hides the update. No profile of
one device shows any of it. With l ranks on each of h hosts, compute takes so many times as long:

    1 + (l - 1) / l × (IN_HOST + (h - 1) / h × BETWEEN_HOSTS)

The constants are fitted to published pairs of one device and many (benchmarks/filled_hosts_rows.py; docs/validation.md
says what they are worth for a set that is left out). Mixed precision has its own: its steps are shorter, the host's
part is not.
"""

from __future__ import annotations

from hvdkit.simulator.costs import ClusterLinks

IN_HOST = {"fp32": 0.059, "mixed": 0.086}
BETWEEN_HOSTS = {"fp32": 0.035, "mixed": 0.11}
MIXED = frozenset({"fp16", "bf16"})  # precisions of recipes


def factor(ranks: int, hosts: int, mixed: bool, network: ClusterLinks) -> float:
    """By what factor compute takes longer than in a profile of so many ranks on so many hosts, at least 1."""
    precision = "mixed" if mixed else "fp32"

    def share(local: int, hosts: int) -> float:
        return (local - 1) / local * (IN_HOST[precision] + (hosts - 1) / hosts * BETWEEN_HOSTS[precision])

    return max(1.0, (1 + share(network.local, network.hosts_used)) / (1 + share(-(-ranks // hosts), hosts)))
