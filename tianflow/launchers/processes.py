"""The launcher ``processes``: many processes on one machine. The coordinator is this process, a
fork server starts every host, data lie in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tianflow.core.program import LauncherCapabilities
from tianflow.launchers.host_forker import ForkedHost, HostForker
from tianflow.launchers.remote import run_hosts, shared_slots

if TYPE_CHECKING:
    from tianflow.interfaces import RunView, Transport

TARGET = "tianflow.hosts.main:main"
PRELOAD = (
    "torch",
    "tianflow.hosts.main",
    "tianflow.components.rollout",
    "tianflow.components.evaluator",
    "tianflow.components.stacking",
)


class ProcessLauncher:
    """`tianflow.interfaces.Launcher`: each host of a program is a forked process."""

    capabilities = LauncherCapabilities()
    slots = staticmethod(shared_slots)

    def prepare(self) -> None:
        """Do nothing: hosts import what they need."""

    async def launch(self, run: RunView, slots: Transport) -> None:
        """Run until the end. No process, socket or memory of a host is left."""
        async with HostForker(run_id=run.id, preload=PRELOAD) as forker:

            async def start(name: str, payload: bytes, descriptors: Sequence[int]) -> ForkedHost:
                return await forker.spawn(name, TARGET, payload, descriptors)

            await run_hosts(run, slots, start)
