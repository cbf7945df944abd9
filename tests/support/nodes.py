"""Nodes of a run in tests: processes of ``tianflow node``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT

END_S = 30.0


class NodeProcess:
    """One ``tianflow node``, started again at will.

    Args:
        join_file: of the run.
        name: of the node.
        log: file for its output.
        wrap: what makes a command run on another machine.
        arguments: further ones.
    """

    def __init__(
        self,
        join_file: Path,
        name: str,
        log: Path,
        *,
        wrap: Callable[..., list[str]] = lambda *command: list(command),
        arguments: Sequence[str] = (),
    ) -> None:
        self.name, self._log = name, log
        self._command = wrap(
            sys.executable, "-m", "tianflow", "node", str(join_file), "--name", name, *arguments
        )
        self.start()

    def start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "controllers"))),
            "OMP_NUM_THREADS": "1",
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
        return self._log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_S)

    def leave(self) -> int:
        """Ask it to end. Its exit code."""
        self.process.terminate()
        return self.process.wait(END_S)

    def stop(self) -> None:
        """Stop it as a machine that is suspended stops; its hosts continue."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def nodes(*made: NodeProcess) -> Iterator[None]:
    """None of them is left afterwards."""
    try:
        yield
    finally:
        for node in made:
            if node.process.poll() is None:
                node.resume()
                node.kill()
