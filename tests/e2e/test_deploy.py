"""What the unit and the container start works: it answers its health check, and a stop as theirs
keeps what the runs have learned.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.documents.test_deploy import STARTED, health_check, unit
from tests.e2e.harness import PATIENCE_S, ROOT, SMALL, assignment, until
from tianflow.core.process_table import carries, processes
from tianflow.rundir.checkpoints import CheckpointStore, resolve
from tianflow.rundir.history import NAME as HISTORY
from tianflow.rundir.history import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
T = TypeVar("T")
STATE, PORT = "/var/lib/tianflow", "8080"


class Deployed:
    """A command of `STARTED`, with a folder and a port of this test in the place of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.environment = {
            **os.environ,
            **dict(assignment.split("=", 1) for assignment in shlex.split(unit()["Environment"])),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "controllers"))),
            "TIANFLOW_TEST": self.mark,
        }
        self.log = folder.parent / f"{self.mark}.log"
        started = [sys.executable, "-m", "tianflow", *map(self.here, command[1:])]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                started,
                cwd=folder,
                env=self.environment,
                umask=int(unit()["UMask"], 8),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def here(self, word: str) -> str:
        return (
            self.port
            if word == PORT
            else word.replace(STATE, str(self.folder)).replace(f":{PORT}/", f":{self.port}/")
        )

    def healthy(self) -> bool:
        """The health check as the container asks it."""
        program, *arguments = map(self.here, health_check())
        assert program == "python"
        return (
            subprocess.run(
                [sys.executable, *arguments], capture_output=True, check=False
            ).returncode
            == 0
        )

    def tell(self, *words: str) -> str:
        command = [
            sys.executable,
            "-m",
            "tianflow",
            *words,
            "--runs-dir",
            str(self.folder / "runs"),
        ]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, text=True, capture_output=True, check=True
        ).stdout

    def until_trained(self, number: int) -> None:
        """Until the one run has made so many updates, as the command line tells then. It is asked
        once: each time it needs half a second of a core.
        """
        path = self.folder / "runs" / "kept" / HISTORY

        def trained() -> bool:
            return path.exists() and any(row["updates"] >= number for row in read_rows(path))

        self.until(f"{number} updates", trained)
        (document,) = json.loads(self.tell("status", "--json"))
        assert number <= document["progress"]["updates"]

    def until(
        self, what: str, condition: Callable[[], T | None], *, within_s: float = PATIENCE_S
    ) -> T:
        return until(what, condition, within_s=within_s, tell=self.log.read_text)

    def descendants(self) -> list[int]:
        mine = [
            entry.pid
            for entry in processes()
            if entry.state not in "ZX" and carries(entry.pid, "TIANFLOW_TEST", self.mark)
        ]
        return [pid for pid in mine if pid != self.process.pid]

    def stop(self) -> int:
        """SIGTERM to it alone, as ``KillMode=mixed`` and a container's runtime do."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(float(unit()["TimeoutStopSec"]))


@contextmanager
def deployed(name: str, folder: Path) -> Iterator[Deployed]:
    made = Deployed(STARTED[name], folder)
    try:
        made.until("it is healthy", made.healthy)
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        for pid in made.descendants():
            os.kill(pid, signal.SIGKILL)


def test_the_container_answers_its_health_check_until_it_is_stopped(tmp_path: Path) -> None:
    with deployed("container", tmp_path) as container:
        assert 128 + signal.SIGTERM == container.stop()
        assert not container.healthy()


def test_a_stopped_unit_has_saved_its_runs_and_goes_on_with_them(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "env.id": "CartPole-v1",  # tests are not installed there
        "learner.slowdown": 20.0,  # it leaves the cores to others
        "run.name": "kept",
    }
    with deployed("unit", tmp_path) as first:
        overrides = (assignment(path, value) for path, value in settings.items())
        assert "kept: pending\n" == first.tell("submit", "cartpole_ppo", *overrides)
        first.until_trained(4)
        assert str(first.stop()) in unit()["SuccessExitStatus"].split()
        assert [] == first.descendants(), "the last process has ended before the service does"
        saved = CheckpointStore.load(resolve("kept", tmp_path / "runs")).version
    with deployed("unit", tmp_path) as second:
        second.until_trained(saved.number + 1)
        assert str(second.stop()) in unit()["SuccessExitStatus"].split()
        assert saved < CheckpointStore.load(resolve("kept", tmp_path / "runs")).version
