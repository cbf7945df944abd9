"""``tianflow serve`` as a user starts it: real runs in real processes, killed services, stopped
learners, and nothing left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.harness import ROOT, SMALL, START_S, until
from tests.support.environments import VanishingEnv
from tianflow.core.process_table import carries, processes
from tianflow.rundir.control_file import SERVICE, ControlFile
from tianflow.server.common import client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(720)]
T = TypeVar("T")
STOP_S = 180.0


@dataclass
class Service:
    """``tianflow serve`` as a child process, and the commands that a person gives beside it."""

    folder: Path
    arguments: tuple[str, ...] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "controllers"))),
            "OMP_NUM_THREADS": "1",
            "TIANFLOW_TEST": self.mark,
        }
        self._stderr = self.folder.parent / f"{self.folder.name}-{uuid.uuid4().hex[:6]}.log"
        command = [
            *self.command("serve"),
            "--port",
            "0",
            "--allow-import",
            "tests.support.environments",
            *self.arguments,
        ]
        with self._stderr.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
            )
        self.control = self.until("it answers", self._found)

    def _found(self) -> ControlFile | None:
        found = ControlFile.read(self.folder, SERVICE)
        return found if found is not None and found.pid == self.process.pid else None

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tianflow", *arguments, "--runs-dir", str(self.folder)]

    def said(self) -> str:
        logs = [self._stderr, *sorted((self.folder / ".service").glob("*.log"))]
        return f"exit code {self.process.poll()}\n" + "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs
        )

    def until(
        self, what: str, condition: Callable[[], T | None], *, within_s: float = START_S
    ) -> T:
        return until(what, condition, within_s=within_s, tell=self.said)

    def tell(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Give a command, as a person does."""
        return subprocess.run(
            self.command(*arguments),
            cwd=ROOT,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=180.0,
            check=False,
        )

    def submit(self, name: str, **settings: object) -> None:
        """What ``tianflow submit`` sends, without its start."""
        given = {
            **SMALL,
            **{key.replace("__", "."): value for key, value in settings.items()},
            "run.name": name,
        }
        answer = client.send(
            *(self.control, "POST", "/api/v1/runs"),
            {"config": "cartpole_ppo", "overrides": given},
            content_type="application/json",
            timeout_s=client.SUBMISSION_S,
        )
        assert (name, "pending") == (answer["id"], answer["state"])

    def get(self, path: str) -> tuple[int, Any]:
        wish = urllib.request.Request(
            self.control.address + path, headers={"Authorization": f"Bearer {self.control.token}"}
        )
        try:
            with urllib.request.urlopen(wish, timeout=10.0) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def run(self, name: str) -> dict[str, Any]:
        return self.get(f"/api/v1/runs/{name}")[1]  # type: ignore[no-any-return]  # a document

    def updates(self, name: str) -> int:
        return int((self.run(name).get("progress") or {}).get("updates", 0))

    def until_training(self, *names: str, more: int = 3) -> None:
        for name in names:
            before = self.updates(name)
            self.until(
                f"{name} trains",
                lambda name=name, before=before: self.updates(name) >= before + more,
            )  # type: ignore[misc]

    def descendants(self) -> list[int]:
        mine = [
            entry.pid
            for entry in processes()
            if entry.state not in "ZX" and carries(entry.pid, "TIANFLOW_TEST", self.mark)
        ]
        return [pid for pid in mine if pid != self.process.pid]

    def pid(self, run: str, host: str) -> int:
        def found() -> int | None:
            for entry in processes():
                comm = Path(f"/proc/{entry.pid}/comm")
                if (
                    carries(entry.pid, "TIANFLOW_TEST", self.mark)
                    and carries(entry.pid, "TIANFLOW_RUN", run)
                    and comm.exists()
                    and comm.read_text().strip() == host
                ):
                    return entry.pid
            return None

        return self.until(f"{host} of {run}", found)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def nothing_left(self) -> None:
        self.until("no process is left", lambda: not self.descendants())


@contextmanager
def service(folder: Path, *arguments: str, mark: str | None = None) -> Iterator[Service]:
    made = Service(folder, arguments, **({"mark": mark} if mark else {}))
    try:
        yield made
        if made.process.poll() is None:
            assert 128 + signal.SIGTERM == made.stop(), made.said()
        made.nothing_left()
        assert [] == [name for name in os.listdir("/dev/shm") if "tianflow" in name]  # noqa: PTH208 - names are wanted
    finally:
        made.process.kill()
        made.process.wait()
        for pid in made.descendants():
            os.kill(pid, signal.SIGKILL)


def test_a_stopped_learner_is_told_of_while_the_service_answers(tmp_path: Path) -> None:
    with service(tmp_path / "runs") as served:
        served.submit("a", env__step_timeout_s=2.0)
        served.until_training("a")
        learner = served.pid("a", "learner")
        os.kill(learner, signal.SIGSTOP)
        try:
            told = served.until(
                "it is not ready", lambda: (run := served.run("a")).get("ready") is False and run
            )
            assert any("learner" in reason for reason in told["reasons"])
            (row,) = served.get("/api/v1/runs")[1]["runs"]
            served.until(
                "the list says so, too",
                lambda: served.get("/api/v1/runs")[1]["runs"][0]["ready"] is False,
            )
            assert "a" == row["id"]
            assert 200 == served.get("/readyz")[0]
        finally:
            os.kill(learner, signal.SIGCONT)
        served.until("it is ready again", lambda: served.run("a").get("ready") is True)


def test_runs_end_and_the_next_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vanished = tmp_path / "vanished"
    monkeypatch.setenv(VanishingEnv.VARIABLE, str(vanished))
    with service(tmp_path / "runs", "--max-runs", "1") as served:
        served.submit("a", run__max_updates=20)
        # at its submission it can still be made
        served.submit("b", env__id="tests.support.environments:VanishingEnv")
        vanished.touch()
        served.submit("c", run__max_updates=20)
        served.until(
            "all have ended",
            lambda: all(run["ended"] for run in served.get("/api/v1/runs")[1]["runs"]),
        )
        states = {
            run["id"]: (run["state"], run["reasons"])
            for run in served.get("/api/v1/runs")[1]["runs"]
        }
        assert ("done", "done") == (states["a"][0], states["c"][0])
        assert "failed" == states["b"][0]
        assert "the simulator has vanished" in states["b"][1][0]
        assert 20 == served.run("a")["summary"]["updates"]
        assert "a    done" in served.tell("status").stdout
        assert 0 == served.tell("top").returncode


def test_two_services_do_not_touch_each_other(tmp_path: Path) -> None:
    with service(tmp_path / "one") as one, service(tmp_path / "two") as two:
        one.submit("a", run__max_updates=10)
        two.submit("a")
        two.until_training("a")
        one.until("its run has ended", lambda: one.run("a").get("state") == "done")
        port = one.control.address.rpartition(":")[2]
        told = subprocess.run(
            [
                sys.executable,
                "-m",
                "tianflow",
                "serve",
                "--port",
                port,
                "--runs-dir",
                str(tmp_path / "three"),
            ],
            cwd=ROOT,
            env=one.environment,
            text=True,
            capture_output=True,
            timeout=180.0,
            check=False,
        )
        assert 2 == told.returncode
        assert port in told.stderr
        assert "is in use" in told.stderr
        assert 128 + signal.SIGTERM == one.stop()
        two.until_training("a")


def test_a_config_that_names_what_it_may_not_or_what_does_not_exist_is_refused_and_runs_nothing(
    tmp_path: Path,
) -> None:
    with service(tmp_path / "runs") as served:
        for env in ("os:system", "Nope-v1"):
            refused = served.tell("submit", "cartpole_ppo", f"env.id={env}")
            assert 2 == refused.returncode
            assert refused.stderr.startswith(f"env.id = '{env}'")
            assert [] == served.get("/api/v1/runs")[1]["runs"]
            assert [] == served.descendants()


@pytest.mark.beside
def test_a_killed_service_leaves_nothing_and_goes_on_with_all_its_runs(tmp_path: Path) -> None:
    names = ("a", "b")
    with service(tmp_path / "runs", "--max-runs", "2") as first:
        for name in names:
            first.submit(name)
        first.until_training(*names)
        assert 0 == first.tell("set", "a", "balance.max_staleness=3").returncode
        assert 0 == first.tell("pause", "b").returncode
        first.until("b rests", lambda: first.run("b").get("state") == "paused")
        before = {name: first.run(name)["progress"]["env_steps"] for name in names}
        first.process.kill()
        first.process.wait()
        first.nothing_left()
        with service(first.folder, "--max-runs", "2", mark=first.mark) as second:
            second.until_training("a")
            second.until("b rests again", lambda: second.run("b").get("state") == "paused")
            found = {name: second.run(name) for name in names}
            assert all(found[name]["progress"]["env_steps"] >= before[name] for name in names)
            assert {"a": 3, "b": 1} == {name: found[name]["staleness"]["bound"] for name in names}
            assert {0} == {found[name]["staleness"]["violations"] for name in names}
            assert all(
                json.loads(line)["action"]
                for line in (second.folder / "a" / "audit.jsonl").read_text().splitlines()
            )


@pytest.mark.beside
def test_a_coordinator_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with service(tmp_path / "runs") as served:
        served.submit("a", checkpoint__every_s=0.5)
        served.until_training("a")
        served.until(
            "a checkpoint", lambda: served.get("/api/v1/runs/a/checkpoints")[1]["checkpoints"]
        )
        coordinator = ControlFile.read(served.folder / "a")
        assert coordinator is not None
        steps = served.get("/api/v1/runs/a/checkpoints")[1]["checkpoints"][0]["env_steps"]
        os.kill(coordinator.pid, signal.SIGKILL)
        served.until(
            "another process",
            lambda: (
                (found := ControlFile.read(served.folder / "a")) and found.pid != coordinator.pid
            ),
        )
        served.until_training("a")
        assert served.run("a")["progress"]["env_steps"] >= steps
        assert 0 == served.run("a")["staleness"]["violations"]
