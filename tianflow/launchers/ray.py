"""The launcher ``ray``: as ``nodes``, with nodes that are actors of Ray.

Ray itself lives in a process beside the coordinator, `tianflow.launchers.ray_driver`, so that its
threads, its signals and its memory are not those of the coordinator. When that process ends, its
actors do.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tianflow.core.program import LauncherCapabilities
from tianflow.errors import ConfigError, Problem, RunError
from tianflow.launchers.nodes import NodeLauncher
from tianflow.launchers.remote import host_environment
from tianflow.logs import logger
from tianflow.plugins import install_line

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from tianflow.interfaces import RunView

DRIVER = "tianflow.launchers.ray_driver"
END_S = 15.0
"""Seconds for the driver to end its actors, before it is killed."""
LAST_LINES = 40
"""Lines of output that explain an end of the driver that nothing asked for."""
LONGEST_LINE = 2**20
"""Bytes of a line of the driver, such as one of a node's log, that are read at most."""
ON_GPU = (
    "auto, cpu, or a driver on a machine with a GPU: ray job submit --entrypoint-num-gpus 1 -- "
    "tianflow train CONFIG placement.launcher=ray"
)
log = logger("ray")


class RayLauncher(NodeLauncher):
    """`tianflow.interfaces.Launcher`: hosts of actors run on nodes that Ray starts. This machine is
    the head.
    """

    capabilities = LauncherCapabilities(nodes=True, on_gpu=ON_GPU)

    def prepare(self) -> None:
        """Refuse a machine without Ray. It is not imported here."""
        if importlib.util.find_spec("ray") is None:
            message = "needs the package ray, which is not installed"
            accepted = f"{install_line('ray')}, or another launcher"
            raise ConfigError([Problem("placement.launcher", "ray", message, accepted)])

    async def provide(self, join_file: Path, run: RunView) -> None:
        """Provide ``ray.nodes`` nodes until cancelled. No actor is left then.

        Raises:
            RunError: there is no cluster, or every node was refused.
        """
        config = run.settings.value.config
        if config.cluster.curve and config.ray.address != "local":
            log.info(
                "a machine without this directory gets the keys of the run through Ray, whose own "
                "connections are encrypted only with RAY_USE_TLS=1",
                directory=str(join_file.parent),
            )
        order = {
            "address": config.ray.address,
            "nodes": config.ray.nodes,
            "cpus": config.ray.cpus_per_node,
            "join_file": str(join_file),
            "run": run.id,
        }
        async with _driver(run.id, order) as driver:
            assert driver.stdout is not None
            failed = ""
            output: deque[str] = deque(maxlen=LAST_LINES)
            async for message in _messages(driver.stdout):
                failed = _show(message) or failed
                output.extend(text for text in [message.get("log")] if text)
            status = await driver.wait()
        if failed:
            raise RunError("ray", failed)
        summary = f"the process with Ray ended with exit code {status}"
        raise RunError("ray", summary, "\n".join(output))


def _show(message: dict[str, Any]) -> str:
    """Log a message of the driver. Why the run cannot go on, if it is that."""
    match message:
        case {"failed": str(reason)}:
            return reason
        case {"log": str(line)}:
            log.info("output of a node", line=line)
        case {"warning": str(event)}:
            log.warning(event, **{key: message[key] for key in message if key != "warning"})
        case {"event": str(event)}:
            log.info(event, **{key: message[key] for key in message if key != "event"})
    return ""


@contextlib.asynccontextmanager
async def _driver(run_id: str, order: dict[str, Any]) -> AsyncIterator[Process]:
    """The process with Ray. When the context is left, it ends its actors, and itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        DRIVER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=LONGEST_LINE,
        env={**host_environment(run_id, "ray"), "RAY_USAGE_STATS_ENABLED": "0"},
        # Ctrl-C in a terminal goes to the coordinator only, which ends the run in order.
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        yield process
    finally:
        # The end of standard input is the request to stop. It also comes if this process is killed.
        process.stdin.close()
        await asyncio.shield(_ended(process))


async def _ended(process: Process) -> None:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(END_S):
            while await process.stdout.read(2**16):
                continue
            await process.wait()
    except TimeoutError:
        log.warning("the process with Ray does not end, and is killed")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def _messages(stream: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Messages of the driver. Other lines are output of Ray and of nodes."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the limit: the rest of it is output, too
            continue
        if not line:
            return
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                yield message
                continue
        if text := line.decode(errors="replace").strip():
            yield {"log": text}
