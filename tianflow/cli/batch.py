"""``tianflow train`` with a launcher that gives the run to a batch system: submission, output, and
signals.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tianflow.cli.common import print_error
from tianflow.errors import ConfigError, Problem, printable
from tianflow.rundir.summary import lost, read_summary

if TYPE_CHECKING:
    from types import FrameType

    from tianflow.interfaces import BatchJob

READ_S = 0.2
"""Seconds between two looks at the output of a job."""
ASK_S = 3.0
"""Seconds between two questions for the state of a job: they cost the batch system time."""


def require_batch(job: BatchJob | None, launcher: str) -> None:
    """Refuse ``--dry-run`` for a run that is not a job."""
    if job is None:
        message = f"the launcher {launcher} submits no job, so it has no script"
        raise ConfigError([Problem("--dry-run", None, message, "placement.launcher = slurm")])


def refuse_eof() -> None:
    """Refuse ``--until-eof`` for a run that is a job."""
    message = "would end the process that follows the job, not the job"
    raise ConfigError([Problem("--until-eof", None, message, "a launcher that runs here")])


def follow(job: BatchJob, *, runs_dir: Path) -> int:
    """Submit ``job``, show its output as ``train`` would, and return the exit code of the run."""
    job.submit()
    print_error(f"{job} is submitted; all its machines have to see {runs_dir.absolute()}")
    return Follower(job).run()


class Follower:
    """Shows what a job writes, until it ends.

    SIGINT and SIGTERM cancel the job, which then ends with a last checkpoint; the second one leaves
    no time for that. At SIGHUP, as when a terminal is closed, the job continues by itself.

    Consumes: output files and state of the job. Produces: standard output and standard error.
    Waits: for its interval. Unblocked by: time.
    """

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        self._caught: list[int] = []
        self._handled = 0
        self._shown = ""
        self._tails = [
            Tail(path, stream)
            for path, stream in zip(job.outputs, (sys.stdout, sys.stderr), strict=True)
        ]

    def run(self) -> int:
        """Follow the job to its end; the exit code."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            if before[number] is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._catch)
        try:
            return self._follow()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self._caught.append(number)

    def _follow(self) -> int:
        asked = -ASK_S
        while True:
            if signal.SIGHUP in self._caught:
                with suppress(OSError):  # the terminal may be gone
                    print_error(f"{self._job} continues; tianflow status shows it")
                return 128 + signal.SIGHUP
            self._cancel()
            # The state first: an ended job has written everything that is read afterwards.
            ended = None
            if time.monotonic() - asked >= ASK_S:
                asked, state = time.monotonic(), self._job.state()
                self._show(state.text)
                ended = state if state.ended else None
            for tail in self._tails:
                tail.read()
            if ended is not None:
                return self._exit_code(ended.code)
            time.sleep(READ_S)

    def _exit_code(self, code: int) -> int:
        """The exit code of the command; ``code`` is that of the job.

        Slurm reports a cancelled job without the exit code of its run. As in a run on this machine,
        lost updates outrank one signal.
        """
        if not self._caught:
            return code
        if len(self._caught) == 1 and lost(read_summary(self._job.directory) or {}):
            return 1
        return 128 + self._caught[0]

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            print_error(f"{self._job}: {text}")

    def _cancel(self) -> None:
        """Pass signals on that have arrived."""
        while self._handled < len(self._caught):
            self._handled += 1
            if self._handled == 1:
                name = signal.Signals(self._caught[0]).name
                print_error(
                    f"{name}: cancelling {self._job}, which writes a last checkpoint; a second "
                    "signal ends it at once"
                )
            self._job.cancel(now=self._handled > 1)


class Tail:
    """Copies what is added to a file.

    Args:
        path: of the file; it may not exist yet.
        stream: gets whole lines.
    """

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path, self._stream = path, stream
        self._position = 0
        self._rest = b""

    def read(self) -> None:
        """Copy lines that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:  # not written yet, or the file system does not answer
            return
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._stream.write(printable(line.decode(errors="replace")) + "\n")
        self._stream.flush()
