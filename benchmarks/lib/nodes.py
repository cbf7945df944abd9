"""Nodes of a run for tests and benchmarks: processes of ``tianflow node``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lib.machine import ROOT

END_S = 30.0
"""Longest time from a signal to the end of a node, on a loaded machine."""


class NodeProcess:
    """One ``tianflow node``, started again at will.

    Args:
        join_file: of the run.
        name: of the node.
        log: file for its output.
        wrap: what makes a command run on another machine.
        arguments: further ones.
        environment: variables besides those of this process.
    """

    def __init__(
        self,
        join_file: Path,
        name: str,
        log: Path,
        *,
        wrap: Callable[..., list[str]] = lambda *command: list(command),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._log = name, log
        self._environment = environment or {}
        self._command = wrap(
            sys.executable, "-m", "tianflow", "node", str(join_file), "--name", name, *arguments
        )
        self.start()

    def start(self) -> None:
        """Start the process."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "controllers"))),
            "OMP_NUM_THREADS": "1",
            **self._environment,
        }
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """Everything that its processes have written."""
        return self._log.read_text()

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait(END_S)

    def leave(self) -> int:
        """Ask the process to end, and return its exit code."""
        self.process.terminate()
        return self.process.wait(END_S)

    def stop(self) -> None:
        """Stop the process, as one whose machine is suspended; its hosts continue."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a stopped process."""
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def nodes(*made: NodeProcess) -> Iterator[None]:
    """None of them is left afterwards."""
    try:
        yield
    finally:
        for node in made:
            if node.alive:
                node.resume()
                node.kill()
