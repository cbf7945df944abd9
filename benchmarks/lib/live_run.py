"""A run of `tianflow train` as a child process, observed from outside: through its files, its HTTP
server and /proc.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from benchmarks.lib.harness import BenchmarkError
from benchmarks.lib.machine import ROOT, clean_environment
from benchmarks.lib.namespaces import Machine
from tianflow.core.process_table import carries, processes
from tianflow.rundir.control_file import ControlFile

T = TypeVar("T")
MARK = "TIANFLOW_BENCHMARK"
"""Environment variable that every process of a run inherits."""
POLL_S = 0.02
ANSWER_S = 60.0
"""Longest wait for an answer, in which a stopped coordinator may be continued. A longer one counts
as no answer.
"""
FORK_SERVER = "tianflow-forks"
SHARED_MEMORY = Path("/dev/shm")


class GoneError(BenchmarkError):
    """Raised when a run ended although it should not have."""


class Answer(NamedTuple):
    """Answer to a request. ``status`` is 0 if there was none, and ``body`` says why."""

    status: int
    body: bytes
    etag: str
    seconds: float

    def json(self) -> dict[str, Any]:
        """Return the body as an object; empty if it is not one."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.body)
            if isinstance(found, dict):
                return found
        return {}


class Process(NamedTuple):
    """A process of a run. ``role`` is the name of its host, ``state`` the letter of /proc."""

    pid: int
    role: str
    state: str


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answer of ``/metrics``. Keys are series as the text writes them, without prefix and run.

    ``counters``: names of families that must not decrease.
    """

    at: float
    series: Mapping[str, float]
    counters: frozenset[str]

    def value(self, name: str, **labels: str) -> float:
        """Return one series. Raises KeyError if it does not exist."""
        return self.series[series_key(name, labels)]

    def total(self, name: str) -> float:
        """Return the sum over all labels; 0 if there is no series."""
        return sum(value for key, value in self.series.items() if key.partition("{")[0] == name)


_SAMPLE = re.compile(r"^tianflow_(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def series_key(name: str, labels: Mapping[str, str]) -> str:
    """Return the key of a series in `Scrape.series`."""
    inside = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
    return f"{name}{{{inside}}}" if inside else name


def parse_metrics(text: str, at: float) -> Scrape:
    """Parse the text format of Prometheus. This is far quicker than a general parser."""
    series: dict[str, float] = {}
    counters = set()
    for line in text.splitlines():
        if line.startswith("# TYPE tianflow_"):
            _, _, name, kind = line.split(" ", 3)
            if kind in ("counter", "histogram"):
                counters.add(name.removeprefix("tianflow_"))
        elif match := _SAMPLE.match(line):
            labels = dict(_LABEL.findall(match[2] or ""))
            labels.pop("run", None)
            series[series_key(match[1], labels)] = float(match[3])
    return Scrape(at, series, frozenset(counters))


def until(what: str, look: Callable[[], T | None], *, within_s: float, poll_s: float = POLL_S) -> T:
    """Call ``look`` until it returns something true, and return that.

    Raises:
        TimeoutError: it did not within ``within_s``. The message names ``what``.
    """
    deadline = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        time.sleep(poll_s)
    return found


class LiveRun:
    """``tianflow train`` as a child process.

    Args:
        name: of the run.
        runs: directory of runs.
        logs: directory for its output. It is not the directory of runs, because that may be full.
        arguments: of ``train``.
        environment: variables besides those of this process.
        machine: where it runs; None: here.
    """

    def __init__(
        self,
        *,
        name: str,
        runs: Path,
        logs: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        machine: Machine | None = None,
    ) -> None:
        self.name, self.directory, self._machine = name, runs / name, machine
        self.mark = uuid.uuid4().hex
        self._out, self._err = (logs / f"{self.mark}.{stream}" for stream in ("out", "err"))
        self._shared_before = set(_shared_files())
        self._contact: tuple[str, int, str] | None = None
        self._own: dict[int, bool] = {}
        options = ("--plain", "--json", "--runs-dir", str(runs))
        command = [sys.executable, "-m", "tianflow", "train", *arguments, *options]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command if machine is None else machine.command(*command),
                cwd=ROOT,
                env={**clean_environment(os.environ), **environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    # Output
    # ----------------------------------------------------------------------------------------------

    @property
    def stderr(self) -> str:
        """Everything on standard error so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    @property
    def summary(self) -> dict[str, Any]:
        """The last line of output, which is JSON; empty before the first line."""
        lines = self._out.read_text(encoding="utf-8", errors="replace").splitlines()
        with contextlib.suppress(ValueError, IndexError):
            found = json.loads(lines[-1])
            if isinstance(found, dict):
                return found
        return {}

    @property
    def alive(self) -> bool:
        """True while the coordinator runs."""
        return self.process.poll() is None

    # HTTP
    # ----------------------------------------------------------------------------------------------

    @property
    def contact(self) -> tuple[str, int, str] | None:
        """Host, port and token; None until the server answers."""
        if self._contact is None:
            found = ControlFile.read(self.directory)
            if found is not None and found.pid == self.process.pid:
                address = urlsplit(found.address)
                assert address.hostname is not None and address.port is not None  # noqa: PT018 - one condition
                self._contact = address.hostname, address.port, found.token
        return self._contact

    def request(
        self,
        path: str,
        method: str = "GET",
        body: Mapping[str, object] | None = None,
        *,
        if_match: str = "",
    ) -> Answer:
        """Send a request on a connection of its own, and time the answer."""
        contact = self.contact
        if contact is None:
            return Answer(0, b"the run has no control file", "", 0.0)
        host, port, token = contact
        headers = {"Authorization": f"Bearer {token}", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        if if_match:
            headers["If-Match"] = if_match
        data = None if body is None else json.dumps(body).encode()

        def ask() -> Answer:
            began = time.monotonic()
            connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
            try:
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                content = answer.read()
                etag = answer.headers.get("ETag", "")
                return Answer(answer.status, content, etag, time.monotonic() - began)
            except (OSError, http.client.HTTPException) as error:
                return Answer(0, repr(error).encode(), "", time.monotonic() - began)
            finally:
                connection.close()

        return self._there(ask)

    def _there(self, work: Callable[[], T]) -> T:
        """Call ``work`` where the run is."""
        return work() if self._machine is None else self._machine.within(work)

    def resource(self, name: str) -> str:
        """Return the path of a resource of the run."""
        return f"/api/v1/runs/{self.name}/{name}".rstrip("/")

    def scrape(self) -> tuple[Answer, Scrape | None]:
        """Read ``/metrics``. None if the answer is not metrics."""
        answer = self.request("/metrics")
        if answer.status != 200:
            return answer, None
        return answer, parse_metrics(answer.body.decode(), time.monotonic())

    # Processes
    # ----------------------------------------------------------------------------------------------

    def table(self) -> list[Process]:
        """All processes of the run except the coordinator, zombies excluded."""
        there = [
            entry
            for entry in processes()
            if entry.pid != self.process.pid and entry.state not in "ZX"
        ]
        # To read every environment at every look would cost more than the run. Several threads
        # look.
        own = {
            entry.pid: self._own.get(entry.pid) or carries(entry.pid, MARK, self.mark)
            for entry in there
        }
        self._own = own
        return [
            Process(entry.pid, role_of(entry.pid), entry.state) for entry in there if own[entry.pid]
        ]

    def kill_all(self) -> None:
        """Kill every process of the run, whatever its state."""
        while table := [process.pid for process in self.table()]:
            for pid in table:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        self.process.kill()
        self.process.wait()

    def wait(self, within_s: float) -> int:
        """Wait for the end of the coordinator and return its exit code. Raises TimeoutError."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the coordinator did not end within {within_s:g} s") from None

    def leftovers(self, within_s: float) -> list[str]:
        """Everything that an ended run has left ``within_s`` seconds after its end, in words."""
        with contextlib.suppress(TimeoutError):
            until("no process is left", lambda: not self.table(), within_s=within_s)
        found = [f"process {p.role} ({p.pid}, state {p.state})" for p in self.table()]
        names = set(_shared_files()) - self._shared_before
        found += [
            f"{SHARED_MEMORY / name}"
            for name in sorted(names)
            if "tianflow" in name or "torch" in name
        ]
        if self._contact is not None:
            host, port, _ = self._contact
            if self._there(lambda: _listens(host, port)):
                found.append(f"a listening socket at {host}:{port}")
        return found


def role_of(pid: int) -> str:
    """Return the name that a process shows; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def private_mib(pid: int) -> float:
    """Return the memory that a process shares with no other; 0 if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024
    return 0.0


def descriptors(pid: int) -> int:
    """Return the number of open files of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - a count is wanted
    return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def waited_for_cpu(pid: int) -> float:
    """Return the seconds that the main thread of a process was ready and got no core; 0 if it has
    ended.
    """
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="utf-8")
        return int(text.split()[1]) / 1e9
    return 0.0


@contextlib.contextmanager
def held(pid: int) -> Iterator[Callable[[int], bool]]:
    """Give a function that signals exactly this process, also if its number is reused. It returns
    False if the process has ended.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda _number: False
        return

    def send(number: int) -> bool:
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        return True

    try:
        yield send
    finally:
        os.close(descriptor)


def _is_ours(name: str) -> bool:
    """Other programs of the machine may make files there, too."""
    return "tianflow" in name or "torch" in name


def _shared_files() -> Iterable[str]:
    return os.listdir(SHARED_MEMORY)  # noqa: PTH208 - names are wanted


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
