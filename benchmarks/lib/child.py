"""Child processes of benchmarks: clean start, common start, memory sampling, and a guaranteed end
of the whole process tree.
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
from benchmarks.lib.namespaces import Machine
from tianflow.launchers.host_forker import HOST_ENVIRONMENT

READY = "ready"
MEMORY_POLL_S = 0.25
AS_IN_HOSTS = (
    "benchmarks.workers.bare_loops",
    "benchmarks.workers.halves",
    "benchmarks.workers.in_turn",
    "benchmarks.workers.inference_server",
    "benchmarks.workers.lockstep",
    "benchmarks.workers.network",
    "benchmarks.workers.shards",
    "benchmarks.workers.updates",
)
"""Workers that run a part of a run alone. They get the allocator settings of a run's hosts, so that
the comparison is fair.
"""


class ChildTimeoutError(BenchmarkError):
    """Raised when a child exceeds its time limit. The child and its descendants are dead by
    then.
    """


@dataclass(frozen=True, slots=True)
class Finished:
    """Answer and cost of a finished child. ``peak_mib``: peak memory of its process tree with
    shared pages divided; None if it was not sampled.
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
    memory_poll_s: float = MEMORY_POLL_S,
    python: Path | None = None,
    threads: int | None = 1,
    echo_errors: bool = False,
    machine: Machine | None = None,
) -> Finished:
    """Run ``python -m module arguments`` to its end. The last line of its output is JSON.

    Sampling memory costs the child time, so a timed run does not sample, or samples rarely.

    ``python`` names another interpreter than this one. ``threads`` is the number of threads of
    numerical libraries in each process. None: the libraries choose. ``echo_errors``: the child
    writes to this process's standard error. ``machine``: where the child runs; None: here.

    Raises:
        ChildTimeoutError: the child was still running after ``timeout_s``.
        BenchmarkError: the child failed or printed nothing. The message contains its stderr.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    errors = None if echo_errors else subprocess.PIPE
    process = _start(module, arguments, python, threads, errors=errors, machine=machine)
    with (
        _ended(process),
        _MemoryWatch(process.pid if watch_memory else None, memory_poll_s) as watch,
    ):
        answer = _answer_of(process, module, timeout_s)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(answer, time.monotonic() - began, cpu_s, watch.peak_mib)


def run_together(
    commands: Sequence[tuple[str, Sequence[object]]], *, timeout_s: float
) -> list[dict[str, Any]]:
    """Start all (module, arguments), wait until each is ready, and start their work at once. Return
    their answers.
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
                    f"{module} did not become ready: {_answer_of(process, module, timeout_s)}"
                )
        for process, _ in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [_answer_of(process, module, timeout_s) for process, module in processes]


class Partner:
    """Child process that answers each line it receives with a line of JSON. It ends with the
    block. ``python`` and ``threads`` as in `run`.
    """

    def __init__(
        self, module: str, *arguments: object, python: Path | None = None, threads: int | None = 1
    ) -> None:
        self._module, self._arguments = module, arguments
        self._python, self._threads = python, threads
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._process = _start(self._module, self._arguments, self._python, self._threads)
        self._stack.enter_context(_ended(self._process))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, line: object) -> None:
        """Send one line. The next `receive` returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def receive(self, *, timeout_s: float) -> dict[str, Any]:
        """Return the next answer. Raises as `run` does."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise ChildTimeoutError(f"{self._module} took longer than {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        return parse(line) if line else _answer_of(self._process, self._module, timeout_s)


def wait_for_start() -> None:
    """In a child of `run_together`: report that everything is ready, and wait for the other
    children.
    """
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def report(answer: dict[str, Any]) -> None:
    """In a child: print the answer."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def parse(output: str) -> dict[str, Any]:
    """Parse the last line of a child's output."""
    answer = json.loads(output.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def _start(
    module: str,
    arguments: Sequence[object],
    python: Path | None = None,
    threads: int | None = 1,
    *,
    errors: int | None = subprocess.PIPE,
    machine: Machine | None = None,
) -> subprocess.Popen[str]:
    inherited = {
        name: value for name, value in clean_environment(os.environ).items() if name not in THREADS
    }
    environment = (HOST_ENVIRONMENT if module in AS_IN_HOSTS else {}) | inherited
    command = [str(python or sys.executable), "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command if machine is None else machine.command(*command),
        cwd=ROOT,
        env=environment if threads is None else environment | dict.fromkeys(THREADS, str(threads)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Any:
    """Kill the process, its group and all its descendants on exit."""
    try:
        yield
    finally:
        # some descendants make process groups of their own
        for pid in _descendants(process.pid) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # descendants can outlive the process, so its group is killed even after its end
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a running process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:  # the list grows during the iteration
        found += children.get(parent, [])
    return found[1:]


def _answer_of(process: subprocess.Popen[str], module: str, timeout_s: float) -> dict[str, Any]:
    try:
        output, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ChildTimeoutError(f"{module} took longer than {timeout_s:.0f} s") from None
    if process.returncode != 0 or not output.strip():
        raise BenchmarkError(
            f"{module} ended with {process.returncode}:\n{(complaint or '').strip()[-4000:]}"
        )
    return parse(output)


class _MemoryWatch:
    """Samples the proportional set size of a process tree while it is open."""

    def __init__(self, pid: int | None, poll_s: float) -> None:
        self._pid, self._poll_s = pid, poll_s
        self.peak_mib: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        if self._pid is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._pid is not None:
            self._thread.join()

    def _sample(self) -> None:
        import psutil

        assert self._pid is not None
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._pid)
            while not self._over.wait(self._poll_s):
                total = 0
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_full_info().pss
                self.peak_mib = max(self.peak_mib or 0.0, total / 2**20)
