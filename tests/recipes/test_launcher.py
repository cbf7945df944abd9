"""The recipe for a launcher: one file and one entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train
from tianflow.api import FinishedRun

SUBPROCESSES = '''
    """Launcher ``subprocesses``: each host is a new Python process."""

    import asyncio
    import contextlib
    import os
    import signal
    import sys

    from tianflow.core.program import LauncherCapabilities
    from tianflow.launchers.remote import run_hosts, shared_slots

    STARTED = []


    class Process:
        def __init__(self, process):
            self._process, self.pid = process, process.pid

        async def wait(self):
            status = await self._process.wait()
            self.kill()
            return status

        def kill(self):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


    class SubprocessLauncher:
        capabilities = LauncherCapabilities()
        slots = staticmethod(shared_slots)

        def prepare(self):
            pass

        async def launch(self, run, slots):
            processes = []

            async def start(name, payload, descriptors):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tianflow.hosts", *map(str, descriptors),
                    stdin=asyncio.subprocess.PIPE, pass_fds=descriptors, start_new_session=True,
                )
                processes.append(Process(process))
                STARTED.append(name)
                process.stdin.write(payload)
                process.stdin.close()
                return processes[-1]

            try:
                await run_hosts(run, slots, start)
            finally:
                for process in processes:
                    process.kill()
                await asyncio.gather(*(process.wait() for process in processes))
'''


def trained(package: UserPackage, folder: Path) -> FinishedRun:
    package.write("subprocesses", SUBPROCESSES)
    package.entry_point("tianflow.launchers", "subprocesses", "subprocesses:SubprocessLauncher")
    return train(
        folder,
        actors={"hosts": 2, "count": 2},
        placement={"launcher": "subprocesses", "affinity": "none"},
    )


@pytest.mark.e2e
def test_an_installed_launcher_starts_every_host_of_a_run(
    user_package: UserPackage, tmp_path: Path
) -> None:
    finished = trained(user_package, tmp_path)
    assert UPDATES == finished.summary["updates"]
    assert finished.summary["evaluation"]["episodes"] > 0
    started = user_package.load("subprocesses").STARTED
    assert ["actors-0", "actors-1", "evaluator", "learner"] == sorted(started)
