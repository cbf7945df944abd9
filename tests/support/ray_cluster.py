"""A real Ray of two nodes on this machine, in a process of its own: ``python -m
tests.support.ray_cluster``. Ray's threads and warnings stay out of the tests.

Requests, one a line of standard input: ``kill`` kills the raylet of the node that has no driver,
``add`` adds a node, ``actors`` asks for the number of actors that are not dead. Each is answered by
a line. The end of standard input ends the cluster.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.paths import ROOT

PARTS = ("raylet", "gcs_server")


def require_ray() -> None:
    """Skip the test where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray (the extra ray) is not installed")


class RayCluster:
    """A cluster, seen from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, request: str) -> str:
        """The answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._read()

    @property
    def actors(self) -> int:
        """Actors that are not dead."""
        return int(self.ask("actors"))


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster of two nodes with one CPU each."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_cluster"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    ) as process:
        try:
            yield RayCluster(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def main() -> None:
    """Be the cluster."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray writes there

    import ray
    from ray._private.state import actors  # the public one needs the dashboard
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    nodes = [cluster.add_node(**size)]
    ray.init(address=cluster.address, log_to_driver=False)

    def answer(text: object) -> None:
        print(text, file=answers, flush=True)

    answer(cluster.address)
    for line in sys.stdin:
        match line.strip():
            case "kill":
                node = nodes.pop()
                node.kill_raylet()
                answer("killed")
            case "add":
                nodes.append(cluster.add_node(**size))
                answer("added")
            case "actors":
                answer(sum(actor["State"] != "DEAD" for actor in actors().values()))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
