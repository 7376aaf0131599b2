"""Two local nodes of Ray, for :mod:`.on_ray`, which runs this with the interpreter of Ray's environment.

Prints the address of the cluster. For each line of its input it then removes the second node, whose processes have been
killed, adds another, and prints the process of the new one's raylet.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    print(cluster.address, raylet(node), flush=True)
    for _ in sys.stdin:
        cluster.remove_node(node, allow_graceful=False)
        node = cluster.add_node(num_cpus=1)
        print(raylet(node), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
