"""The process with Ray: one order on standard input -> one actor of Ray a node -> messages.

Only text crosses Ray: paths, the join file, and what a node has written. The end of standard input
ends all actors and this process.

Messages (JSON, one a line of standard output): ``{"event": ..., ...}`` and ``{"warning": ...,
...}`` are for the log of the run, ``{"failed": reason}`` is the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STDIN = 0
PR_SET_PDEATHSIG = 1
BACK_OFF_S = (1.0, 30.0)
"""Seconds before a node that ended is started again: the first and the longest."""
CONNECT_S = 10.0
"""Seconds for a cluster to accept a connection."""
WAIT_S = 10.0
"""Seconds between two reports that Ray has no room for the nodes."""
LAST_LINES = 20
"""Lines of a node's output that are reported with its exit."""
REFUSED = 2
"""Exit code of a node that the run does not accept."""
BOOT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGCONT); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Starts a program that gets SIGCONT when its parent is gone, as when Ray kills an actor. A stopped
program would not get SIGTERM.
"""


@dataclass(frozen=True)
class RayOrder:
    """What the launcher asks for."""

    address: str
    nodes: int
    cpus: int
    join_file: str
    run: str


class NodeStarter:
    """An actor of Ray: runs ``tianflow node`` on its machine. Its arguments and answers are text
    and numbers.
    """

    def machine(self) -> str:
        """An id of this machine. Nodes of Ray may share one."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 - Ray ships this class by value
            return file.read().strip()

    def sees(self, path: str, digest: str) -> bool:
        """True if the file ``path`` is on this machine, too."""
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest
        except OSError:
            return False

    def run(
        self,
        *,
        name: str,
        path: str,
        text: str,
        place: int,
        cpus: int,
        environment: dict[str, str],
    ) -> tuple[int, list[str]]:
        """Run the node until it ends: its exit code, and the last lines that it wrote.

        Args:
            name: of the node.
            path: of the join file.
            text: contents of the join file, for a machine that does not see it; else "".
            place: number of nodes before it on this machine.
            cpus: number of cores.
            environment: variables of the node.
        """
        with contextlib.ExitStack() as stack:
            if text:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tianflow-"))
                path = str(Path(folder) / "join.toml")
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(text)
            usable = sorted(os.sched_getaffinity(0))
            cores = {usable[(place * cpus + number) % len(usable)] for number in range(cpus)}
            node = ["-m", "tianflow", "node", path, "--once", "--name", name]
            node += ["--cores", ",".join(map(str, sorted(cores))), "--leave-with", str(os.getpid())]
            lines: list[str] = []
            with subprocess.Popen(  # noqa: S603 - the command is made here
                [sys.executable, "-c", BOOT, str(os.getpid()), sys.executable, *node],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                text=True,
                errors="replace",
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line.rstrip(), flush=True)  # noqa: T201 - Ray carries it to the driver
                    lines = [*lines[1 - LAST_LINES :], line.rstrip()]
            return process.returncode, lines


class RayNodes:
    """The nodes of one run as actors of Ray.

    Consumes: exits of nodes and of actors. Produces: messages. Waits: for Ray.
    Unblocked by: cancellation.

    Args:
        order: of the launcher.
        text: contents of the join file.
        ray: the module.
    """

    def __init__(self, order: RayOrder, text: str, ray: Any) -> None:
        self._order, self._text, self._ray = order, text, ray
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        self._refused: dict[int, str] = {}
        self._places: Counter[str] = Counter()
        self._environment = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
        }

    async def run(self) -> None:
        """Provide nodes until cancelled. RefusedError if the run accepts none of them."""
        group = await self._group()
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._order.nodes):
                tasks.create_task(self._provide(index, group))

    async def _group(self) -> Any:
        """A placement group with a bundle of CPUs for each node, once Ray has them."""
        cpus, count = self._order.cpus, self._order.nodes
        machines = [
            node
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= cpus
        ]
        strategy = "STRICT_SPREAD" if len(machines) >= count else "SPREAD"
        if strategy == "SPREAD":
            report(
                warning="Ray has fewer machines than nodes are wanted, so nodes share machines",
                machines=len(machines),
                nodes=count,
            )
        group = self._ray.util.placement_group([{"CPU": cpus}] * count, strategy=strategy)
        while not await asyncio.to_thread(group.wait, WAIT_S):
            free = self._ray.available_resources().get("CPU", 0)
            report(warning="Ray has no room for the nodes yet", cpus=cpus * count, free=free)
        report(event="Ray has room for the nodes", nodes=count, cpus=cpus, strategy=strategy)
        return group

    async def _provide(self, index: int, group: Any) -> None:
        """Provide one node: start it again whenever it ends, and wherever Ray restarts its
        actor.
        """
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        )
        starter = (
            self._ray.remote(NodeStarter)
            .options(num_cpus=self._order.cpus, max_restarts=-1, scheduling_strategy=strategy)
            .remote()
        )
        wait_s, starts = BACK_OFF_S[0], 0
        while True:
            # A name of its own: the node before may not have left yet.
            name = f"ray-{index}" if starts == 0 else f"ray-{index}.{starts}"
            starts += 1
            began = asyncio.get_running_loop().time()
            try:
                code, lines = await self._run_node(starter, name)
                self._ended(index, name, code, lines)
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                report(warning="Ray has lost a node, and starts it again", node=name, why=reason)
            lived = asyncio.get_running_loop().time() - began
            wait_s = BACK_OFF_S[0] if lived > BACK_OFF_S[1] else min(2 * wait_s, BACK_OFF_S[1])
            await asyncio.sleep(wait_s)

    async def _run_node(self, starter: Any, name: str) -> tuple[int, list[str]]:
        machine = await starter.machine.remote()
        place = self._places[machine]
        self._places[machine] += 1
        try:
            sees = await starter.sees.remote(self._order.join_file, self._digest)
            text = "" if sees else self._text
            report(event="a node starts", node=name, machine=machine, sees_directory=sees)
            ended: tuple[int, list[str]] = await starter.run.remote(
                name=name,
                path=self._order.join_file,
                text=text,
                place=place,
                cpus=self._order.cpus,
                environment=self._environment,
            )
            return ended
        finally:
            self._places[machine] -= 1

    def _ended(self, index: int, name: str, code: int, lines: list[str]) -> None:
        if code == 0:
            report(event="a node has ended", node=name)
            return
        report(warning="a node has failed", node=name, code=code, output="\n".join(lines))
        if code == REFUSED:
            self._refused[index] = "\n".join(lines)
            if len(self._refused) == self._order.nodes:
                raise RefusedError(f"every node was refused:\n{self._refused[index]}")
        else:
            self._refused.pop(index, None)


class RefusedError(Exception):
    """The nodes cannot be provided."""


def report(**message: object) -> None:
    """Send a message to the launcher."""
    with contextlib.suppress(BrokenPipeError):  # the coordinator is gone; so is standard input
        print(json.dumps(message), flush=True)  # noqa: T201 - the launcher reads it


def connect(address: str, run: str) -> Any:
    """Connect to the cluster at ``address``, or start one. The module `ray`.

    Raises:
        RefusedError: there is no cluster.
    """
    import ray
    import ray.util.scheduling_strategies

    advice = "start one on this machine (ray start --head), or set ray.address = local"
    if ":" in address:  # Ray would try for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            message = f"ray.address = {address!r}: no cluster answers ({error}); {advice}"
            raise RefusedError(message) from error
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, namespace=f"tianflow-{run}", log_to_driver=True, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        words = str(error).strip().splitlines()[0]
        raise RefusedError(f"ray.address = {address!r}: {words}; {advice}") from error
    return ray


async def provide(order: RayOrder, text: str, ray: Any) -> None:
    """Provide nodes until standard input ends."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def wait_for_end() -> None:
        while os.read(STDIN, 4096):
            continue
        loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    nodes = asyncio.create_task(RayNodes(order, text, ray).run())
    end = asyncio.create_task(stopped.wait())
    await asyncio.wait({nodes, end}, return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    if nodes.done():
        try:
            nodes.result()
        except BaseExceptionGroup as group:
            raise _first(group) from group
    nodes.cancel()
    await asyncio.gather(nodes, return_exceptions=True)


def main() -> int:
    """Serve one order; the exit code."""
    # Stopped, it would not see that the coordinator is gone, and its actors would stay.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    line = bytearray()
    while (byte := os.read(STDIN, 1)) not in {b"", b"\n"}:
        line += byte
    fields: Mapping[str, Any] = json.loads(line)
    order = RayOrder(**fields)
    ray: Any = None
    try:
        text = Path(order.join_file).read_text(encoding="ascii")
        ray = connect(order.address, order.run)
        asyncio.run(provide(order, text, ray))
    except RefusedError as error:
        report(failed=str(error))
        return 1
    finally:
        if ray is not None:
            ray.shutdown()
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process in order
    sys.exit(main())
