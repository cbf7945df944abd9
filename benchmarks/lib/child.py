"""Child processes of benchmarks: started clean, together if need be, watched, and gone afterwards
whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.lib.harness import BenchmarkError
from benchmarks.lib.machine import ROOT, THREADS, clean_environment
from tianflow.launchers.host_forker import HOST_ENVIRONMENT

READY = "ready"
MEMORY_LOOK_S = 0.25
AS_IN_HOSTS = (
    "benchmarks.workers.bare_loops",
    "benchmarks.workers.halves",
    "benchmarks.workers.lockstep",
    "benchmarks.workers.shards",
)
"""Parts of a run by themselves: their memory is dealt with as in the hosts of a run, so that a run
is not compared with less.
"""


class TookLongerError(BenchmarkError):
    """A child was not through within its time, and is gone with all that it started."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a child said last, and what it cost. ``peak_mib``: of its whole tree, shared pages
    divided; None if not asked for.
    """

    answer: dict[str, Any]
    wall_s: float
    cpu_s: float
    peak_mib: float | None


def run(
    module: str,
    *arguments: object,
    timeout_s: float,
    watch_memory: bool = False,
    memory_look_s: float = MEMORY_LOOK_S,
    python: Path | None = None,
    threads: int | None = 1,
) -> Finished:
    """``python -m module arguments``, to its end; its last line of output is JSON.

    Watching memory costs the child time, so a run that is timed does without, or is looked at
    seldom. ``python``: an interpreter other than this one. ``threads``: of numerical libraries in
    each process; None leaves it to them.

    Raises:
        TookLongerError: it was not through after ``timeout_s``.
        BenchmarkError: it failed, or said nothing; with what it wrote to stderr.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = _start(module, arguments, python, threads)
    with (
        _ended(process),
        _MemoryWatch(process.pid if watch_memory else None, memory_look_s) as watch,
    ):
        answer = _last_words(process, module, timeout_s)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(answer, time.monotonic() - began, cpu_s, watch.peak_mib)


def run_together(
    commands: Sequence[tuple[str, Sequence[object]]], *, timeout_s: float
) -> list[dict[str, Any]]:
    """Start all (module, arguments), wait until each has said that it is ready, let all go at once;
    what each said last.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        for module, arguments in commands:
            process = _start(module, arguments)
            stack.enter_context(_ended(process))
            processes.append((process, module))
        for process, module in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != READY:
                raise BenchmarkError(
                    f"{module} did not get ready: {_last_words(process, module, timeout_s)}"
                )
        for process, _ in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [_last_words(process, module, timeout_s) for process, module in processes]


class Partner:
    """``python -m module arguments``, which is told things, and answers each with a line of JSON;
    gone when the block is left.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        self._module, self._arguments = module, arguments
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._process = _start(self._module, self._arguments)
        self._stack.enter_context(_ended(self._process))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tell(self, what: object) -> None:
        """One line; the next that `hear` gives is about it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()

    def hear(self, *, timeout_s: float) -> dict[str, Any]:
        """Its next line. Raises as `run` does."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TookLongerError(f"{self._module} took longer than {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        return parse(line) if line else _last_words(self._process, self._module, timeout_s)


def wait_for_go() -> None:
    """In a child that `run_together` started: say that everything is made, and wait for the
    others.
    """
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def say(answer: dict[str, Any]) -> None:
    """In a child: its last words."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def parse(said: str) -> dict[str, Any]:
    """The last line of what a child said."""
    answer = json.loads(said.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def _start(
    module: str, arguments: Sequence[object], python: Path | None = None, threads: int | None = 1
) -> subprocess.Popen[str]:
    inherited = {
        name: value for name, value in clean_environment(os.environ).items() if name not in THREADS
    }
    environment = (HOST_ENVIRONMENT if module in AS_IN_HOSTS else {}) | inherited
    return subprocess.Popen(
        [str(python or sys.executable), "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=environment if threads is None else environment | dict.fromkeys(THREADS, str(threads)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Any:
    """Leaves neither the process nor its group nor any descendant behind."""
    try:
        yield
    finally:
        for pid in (
            _descendants(process.pid) if process.poll() is None else ()
        ):  # some make groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(
            ProcessLookupError
        ):  # also when it has ended: what it started may not have
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _descendants(pid: int) -> list[int]:
    """Of a process that is there: those that it started, and those that they did, and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:  # grows while it is gone through
        found += children.get(parent, [])
    return found[1:]


def _last_words(process: subprocess.Popen[str], module: str, timeout_s: float) -> dict[str, Any]:
    try:
        said, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TookLongerError(f"{module} took longer than {timeout_s:.0f} s") from None
    if process.returncode != 0 or not said.strip():
        raise BenchmarkError(
            f"{module} ended with {process.returncode}:\n{complaint.strip()[-4000:]}"
        )
    return parse(said)


class _MemoryWatch:
    """Looks at the proportional set size of a process and all its descendants while it is open."""

    def __init__(self, pid: int | None, look_s: float) -> None:
        self._pid, self._look_s = pid, look_s
        self.peak_mib: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        if self._pid is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._pid is not None:
            self._thread.join()

    def _look(self) -> None:
        import psutil

        assert self._pid is not None
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._pid)
            while not self._over.wait(self._look_s):
                total = 0
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_full_info().pss
                self.peak_mib = max(self.peak_mib or 0.0, total / 2**20)
