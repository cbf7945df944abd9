"""A run as a user starts it: a process of its own, watched from outside through its files, its HTTP
server and /proc.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.support.machines import Machine
from tianflow.core.process_table import processes
from tianflow.rundir.control_file import NAME, ControlFile

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
POLL_S, SLOWEST_POLL_S = 0.05, 0.2
"""Seconds between two looks, at first and after two seconds: each look takes milliseconds of a core
from what is waited for.
"""
SAMPLE = re.compile(r"(?:tianflow_)?([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
START_S = 120.0
"""A machine that has other things to do takes this long to import PyTorch in the worst case."""
PATIENCE_S = 90.0
"""What comes within a second comes within this anywhere: a limit for what never comes, no measure
of how fast.
"""
SMALL: Mapping[str, object] = {
    "env.id": "tests.support.environments:PacedEnv",
    "env.num_envs": 2,
    "algorithm.epochs": 1,
    "algorithm.minibatch_size": 32,
    "network.hidden": [8],
    "actors.count": 2,
    "actors.hosts": 2,
    "actors.rollout_steps": 16,
    "evaluation.episodes": 8,
    "evaluation.num_envs": 2,
    "metrics.interval_s": 0.2,
    "placement.affinity": "none",
    "run.target_return": None,
    "run.max_env_steps": None,
    "run.grace_s": 5.0,
}
"""A run with tens of updates a second, and that never ends by itself. Its environments wait most of
the time: it would otherwise take both cores from the tests beside it. Its last evaluation takes part
of a second.
"""


class ImpatienceError(AssertionError):
    """Something did not come true in time."""


def until(
    what: str,
    condition: Callable[[], T | None],
    *,
    within_s: float = PATIENCE_S,
    tell: Callable[[], str] = str,
) -> T:
    """Ask again and again until ``condition`` answers something true, and give it back."""
    deadline, poll_s = time.monotonic() + within_s, POLL_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise ImpatienceError(f"not within {within_s:g} s: {what}\n{tell()}")
        time.sleep(poll_s)
        poll_s = min(1.07 * poll_s, SLOWEST_POLL_S)
    return found


def assignment(path: str, value: object) -> str:
    """One override as the command line takes it. JSON is TOML for all that tests set, but null and
    tables.
    """
    if isinstance(value, Mapping):
        return (
            f"{path}={{ "
            f"{', '.join(f'{key} = {json.dumps(item)}' for key, item in value.items())} }}"
        )
    return f"{path}={json.dumps(value)}"


@dataclass
class LiveRun:
    """``tianflow train`` as a child process. Everything that descends from it carries ``mark`` in
    its environment.
    """

    folder: Path
    settings: Mapping[str, object]
    arguments: tuple[str, ...]
    name: str
    machine: Machine | None = None
    """Where it runs; None: on this machine."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stdout, self._stderr = (
            self.folder / f"{stream}-{self.mark}" for stream in ("stdout", "stderr")
        )
        overrides = [assignment(path, value) for path, value in self.settings.items()]
        command = [
            sys.executable,
            "-m",
            "tianflow",
            "train",
            *self.arguments,
            "--plain",
            "--json",
            "--runs-dir",
            str(self.folder),
            *overrides,
        ]
        if self.machine is not None:
            command = self.machine.command(*command)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "controllers"))),
            "OMP_NUM_THREADS": "1",
            "TIANFLOW_TEST": self.mark,
        }
        with self._stdout.open("w") as out, self._stderr.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    # What it says
    # ----------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        return self.folder / self.name

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def result(self) -> dict[str, Any]:
        """The line of JSON at its end."""
        return json.loads(self.stdout.splitlines()[-1])  # type: ignore[no-any-return]  # our own output

    def output(self) -> str:
        """Exit code and newest output of the process, to explain a failed test."""
        return (
            f"exit code {self.process.poll()}\n--- stdout\n{self.stdout[-3000:]}\n--- "
            f"stderr\n{self.stderr[-6000:]}"
        )

    @property
    def control_file(self) -> Path:
        return self.directory / NAME

    @property
    def control(self) -> ControlFile | None:
        found = ControlFile.read(self.directory)
        return found if found is not None and found.pid == self.process.pid else None

    def request(
        self, path: str, method: str = "GET", body: Mapping[str, object] | None = None
    ) -> tuple[int, str]:
        """Status and body of an answer; (0, "") when nobody answers."""
        control = self.control
        if control is None:
            return 0, ""
        if self.machine is not None:
            return self.machine.within(lambda: self._ask(control, path, method, body))
        return self._ask(control, path, method, body)

    @staticmethod
    def _ask(
        control: ControlFile, path: str, method: str, body: Mapping[str, object] | None
    ) -> tuple[int, str]:
        headers = {
            "Authorization": f"Bearer {control.token}",
            "Content-Type": "application/merge-patch+json",
        }
        data = None if body is None else json.dumps(body).encode()
        wish = urllib.request.Request(control.address + path, data, headers, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                wish, timeout=10.0
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def post_bytes(self, action: str, data: bytes) -> int:
        """Status of the answer to ``data``, whatever it is."""
        control = self.control
        assert control is not None
        wish = urllib.request.Request(
            f"{control.address}/api/v1/runs/{self.name}/{action}", data, method="POST"
        )
        try:
            with urllib.request.urlopen(wish, timeout=10.0) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def status(self) -> dict[str, Any]:
        """The run's document; empty when nobody answers."""
        code, body = self.request(f"/api/v1/runs/{self.name}")
        return json.loads(body) if code == 200 else {}

    def act(self, action: str) -> None:
        code, body = self.request(f"/api/v1/runs/{self.name}/{action}", "POST")
        assert 202 == code, f"{code} {body}\n{self.output()}"

    def patch(self, resource: str, **values: object) -> None:
        code, body = self.request(f"/api/v1/runs/{self.name}/{resource}", "PATCH", values)
        assert 200 == code, body

    def ready(self) -> bool:
        return self.request("/readyz")[0] == 200

    def why_not_ready(self) -> str:
        """The reasons; "" while it is ready or does not answer."""
        code, body = self.request("/readyz")
        return "; ".join(json.loads(body)["reasons"]) if code == 503 else ""

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Samples by name and sorted label values (the run's own left out). Tests ask again and
        again, and the parser of `prometheus_client` takes most of a core then.
        """
        body = self.request("/metrics")[1]
        found = {}
        for line in body.splitlines():
            if not line.startswith("#"):
                sample = SAMPLE.fullmatch(line)
                assert sample is not None, line
                labels = sorted(pair for pair in LABEL.findall(sample[2] or "") if pair[0] != "run")
                found[sample[1], *(value for _, value in labels)] = float(sample[3])
        return found

    def metric(self, *key: str) -> float:
        return self.metrics().get(key, 0.0)

    def restarts(self) -> float:
        return sum(
            value for key, value in self.metrics().items() if key[0] == "component_restarts_total"
        )

    def checkpoints(self) -> list[Path]:
        """Those that have their name, oldest first."""
        return sorted((self.directory / "checkpoints").glob("v*-*"))

    def staged(self) -> list[Path]:
        """Checkpoints that are being written."""
        return sorted((self.directory / "checkpoints").glob(".tmp-*"))

    # What it is made of
    # ----------------------------------------------------------------------------------------------

    def descendants(self) -> dict[int, str]:
        """Whoever carries the run's id or this test's mark, but for the coordinator: pid and
        name.
        """
        return {
            entry.pid: command_of(entry.pid)
            for entry in processes()
            if entry.state not in "ZX" and self._descends(entry.pid)
        }

    def _descends(self, pid: int) -> bool:
        marks = {f"TIANFLOW_TEST={self.mark}".encode(), f"TIANFLOW_RUN={self.name}".encode()}
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return pid != self.process.pid and not marks.isdisjoint(environment)

    def pid(self, host: str) -> int | None:
        found = (
            entry.pid
            for entry in processes()
            if entry.state not in "ZX" and command_of(entry.pid) == host
        )
        return next(filter(self._descends, found), None)

    def wait_for_pid(self, host: str) -> int:
        return self.until(f"a process called {host}", lambda: self.pid(host))

    def kill(self, host: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the process of ``host``, as soon as there is one."""
        pid = self.wait_for_pid(host)
        os.kill(pid, number)
        return pid

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 - a count is wanted

    # Waiting
    # ----------------------------------------------------------------------------------------------

    def until(
        self, what: str, condition: Callable[[], T | None], *, within_s: float = PATIENCE_S
    ) -> T:
        """As `until`; ends at once when the process has."""

        def unless_ended() -> T | None:
            found = condition()
            if not found and self.process.poll() is not None:
                raise ImpatienceError(f"the run ended before: {what}\n{self.output()}")
            return found

        return until(what, unless_ended, within_s=within_s, tell=self.output)

    def until_training(self, *, more: int = 1, within_s: float = START_S) -> int:
        """Until ``more`` updates have been settled than now; how many there are."""

        def updates() -> int:
            return int(self.metric("learner_updates_total"))

        before = updates()

        self.until(
            f"{before + more} updates", lambda: updates() >= before + more, within_s=within_s
        )
        return updates()

    def until_checkpoint(self) -> Path:
        """Ask for a checkpoint and wait for a new one; where it is."""
        before = set(self.checkpoints())
        self.act("checkpoint")
        return self.until(
            "a new checkpoint", lambda: next(iter(set(self.checkpoints()) - before), None)
        )

    def end(self, within_s: float = PATIENCE_S) -> int:
        """Wait until it has ended; its exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise ImpatienceError(
                f"it did not end within {within_s:g} s\n{self.output()}"
            ) from None

    def interrupt(self, number: int = signal.SIGINT, within_s: float = PATIENCE_S) -> int:
        self.process.send_signal(number)
        return self.end(within_s)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def run(
    folder: Path,
    *arguments: str,
    machine: Machine | None = None,
    base: Mapping[str, object] = SMALL,
    **settings: object,
) -> Iterator[LiveRun]:
    """A run with the settings of ``base`` and ``settings`` (``env__id`` means ``env.id``), on
    ``machine``; nothing of it may be left afterwards.
    """
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are wanted; this is the directory that must stay clean
    given = {key.replace("__", "."): value for key, value in settings.items()}
    name = f"run-{uuid.uuid4().hex[:12]}"
    with _watched(
        LiveRun(
            folder,
            {**base, **given, "run.name": name},
            arguments or ("cartpole_ppo",),
            name,
            machine,
        ),
        before,
    ) as live:
        yield live


@contextmanager
def resumed(live: LiveRun) -> Iterator[LiveRun]:
    """``train --resume`` of a run that has ended."""
    with _watched(LiveRun(live.folder, {}, ("--resume", live.name), live.name), set()) as again:
        yield again


@contextmanager
def _watched(live: LiveRun, before: set[str]) -> Iterator[LiveRun]:
    try:
        yield live
        if live.process.poll() is None:
            live.interrupt()
        nothing_left(live, before)
    finally:
        for pid in live.descendants():
            os.kill(pid, signal.SIGKILL)
        live.process.kill()
        live.process.wait()


def nothing_left(live: LiveRun, shared_before: set[str], within_s: float = PATIENCE_S) -> None:
    """No process, no socket, no memory file, no half-written checkpoint."""
    until(
        "no process is left",
        lambda: not live.descendants(),
        within_s=within_s,
        tell=lambda: str(live.descendants()),
    )

    def memory_files() -> set[str]:
        """Those that came since. Other processes of the machine have such files for a moment."""
        new = set(os.listdir("/dev/shm")) - shared_before  # noqa: PTH208 - as in `run`
        return {name for name in new if "tianflow" in name or "torch" in name}

    until(
        "no memory file is left",
        lambda: not memory_files(),
        within_s=within_s,
        tell=lambda: str(memory_files()),
    )
    control = ControlFile.read(live.directory)
    if control is not None:  # only a coordinator that was killed leaves it
        assert not control.alive
        host, port = control.address.removeprefix("http://").rsplit(":", 1)
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0
    assert [] == list(Path(tempfile.gettempdir()).glob(f"*{live.mark}*"))


def stop_and_continue(live: LiveRun, host: str, *, seconds: float) -> None:
    """Stop a host's process, and continue it after so many ``seconds``."""
    pid = live.kill(host, signal.SIGSTOP)
    time.sleep(seconds)  # how long it stands still is the experiment, nothing is waited for
    os.kill(pid, signal.SIGCONT)


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Addresses (IPv4; "" for others) and ports on which one of ``pids`` accepts connections."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                host = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if table == "tcp" else ""
                sockets[f"socket:[{fields[9]}]"] = (host, int(port, 16))
    return {sockets[target] for pid in pids for target in _open_files(pid) if target in sockets}


def _open_files(pid: int) -> Iterator[str]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield str(path.readlink())
