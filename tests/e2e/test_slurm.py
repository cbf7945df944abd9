"""A run as a job of a real Slurm: submitted, followed, changed, cancelled, requeued and preempted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT, SMALL, START_S, assignment, until
from tests.e2e.test_replay import APEX
from tests.support.slurm import KILL_WAIT_S, Cluster, require_slurm, slurm, tianflow
from tianflow.core.process_table import carries, processes
from tianflow.errors import RequestError
from tianflow.rundir.checkpoints import CheckpointStore
from tianflow.rundir.control_file import ControlFile
from tianflow.rundir.summary import REQUESTED
from tianflow.server.common import client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
END_S = 60.0
SLOW = {"env.kwargs": {"seconds": 0.005}}
"""Most tests wait for Slurm, while the run would take a quarter of a core."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        assert 2 == found.call("srun", "-N2", "hostname").count("\n")
        yield found


def environment(cluster: Cluster) -> dict[str, str]:
    """Variables of a command that uses ``cluster``."""
    paths = (str(ROOT), str(ROOT / "controllers"), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, paths))
    return {**cluster.environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class Submitted:
    """``tianflow train ... placement.launcher=slurm`` as a child process that follows its job."""

    def __init__(self, cluster: Cluster, runs: Path, name: str, *arguments: str) -> None:
        self.cluster, self.runs, self.name = cluster, runs, name
        runs.mkdir(parents=True, exist_ok=True)
        self._out, self._err = (runs / f"{uuid.uuid4().hex}.{stream}" for stream in ("out", "err"))
        command = tianflow("train", *arguments, "--runs-dir", str(runs))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(cluster),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def directory(self) -> Path:
        return self.runs / self.name

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def output(self) -> str:
        files = sorted((self.runs / ".slurm" / self.name).glob("*.[oe][ur][tr]"))
        written = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in files)
        return (
            f"{self.process.poll()}\n--- stdout\n{self.stdout[-2000:]}\n--- stderr\n"
            f"{self.stderr[-4000:]}\n{written}\n{self.cluster.logs()}"
        )

    def end(self, within_s: float = END_S) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end\n{self.output()}") from None

    @property
    def job(self) -> str:
        return until("a job", lambda: self._job, tell=self.output)

    @property
    def _job(self) -> str:
        found = re.search(r"job (\d+) of run", self.stderr)
        return found[1] if found else ""

    def document(self, part: str = "") -> dict[str, Any]:
        """The run's document, or a part of it; empty while it does not answer."""
        contact = ControlFile.read(self.directory)
        if contact is None or not contact.alive:
            return {}
        try:
            found: dict[str, Any] = client.request(contact, "GET", part)
        except RequestError:
            return {}
        return found

    def until_training(self, more: int = 2) -> None:
        def trains() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"it ended\n{self.output()}")
            return bool(self.document().get("progress", {}).get("updates", 0) >= more)

        until("it trains", trains, within_s=START_S, tell=self.output)

    @property
    def pid(self) -> int:
        """Of the head; 0 without one."""
        contact = ControlFile.read(self.directory)
        return contact.pid if contact is not None and contact.alive else 0

    def updates(self) -> int:
        return int(self.document().get("progress", {}).get("updates", 0))


def call(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of tianflow from outside the job."""
    return subprocess.run(
        tianflow(*arguments),
        cwd=ROOT,
        env=environment(cluster),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@contextmanager
def submitted(
    cluster: Cluster, runs: Path, *arguments: str, config: str = "cartpole_ppo", **settings: object
) -> Iterator[Submitted]:
    """A small run of ``config`` as a job. Nothing of it is left afterwards."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    given = {key.replace("__", "."): value for key, value in settings.items()}
    small = {**SMALL, **SLOW, "placement.launcher": "slurm", "run.name": name, **given}
    overrides = [assignment(path, value) for path, value in small.items()]
    name = str(small["run.name"])
    with following(Submitted(cluster, runs, name, config, *overrides, *arguments)) as found:
        yield found


@contextmanager
def following(found: Submitted) -> Iterator[Submitted]:
    try:
        yield found
        until(
            "nothing of the job is left",
            lambda: not left(found.name) and found._job not in found.cluster.states(),
            tell=lambda: f"{left(found.name)}\n{found.output()}",
        )
    finally:
        found.process.kill()
        found.process.wait()
        if found._job in found.cluster.states():
            found.cluster.call("scancel", found._job)


def left(run: str) -> list[int]:
    """Processes of a run that still exist."""
    return [
        entry.pid
        for entry in processes()
        if entry.state not in "ZX"
        and (carries(entry.pid, "TIANFLOW_RUN", run) or carries(entry.pid, "SLURM_JOB_NAME", run))
    ]


def test_a_run_that_ends_shows_its_result_and_its_exit_code_and_is_resumed_as_a_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    with submitted(cluster, tmp_path, "--json", run__max_updates=20) as found:
        assert 0 == found.end(START_S), found.output()
        result = json.loads(found.stdout)
        assert (found.name, 20) == (result["run"], result["updates"]), result
        for text in (f"job {found.job} of run {found.name}", "running", "see", str(tmp_path)):
            assert text in found.stderr
        assert "updates 20" in found.stderr  # a line as `train` shows it
        assert "completed" in found.stderr

    # No new run takes its directory.
    overrides = ("placement.launcher=slurm", "env.id=CartPole-v1", f"run.name={found.name}")
    taken = call(cluster, "train", "cartpole_ppo", *overrides, "--runs-dir", str(tmp_path))
    assert (2, True) == (taken.returncode, "exists; choose another run.name" in taken.stderr)

    # The resumed one misses its target.
    settings = ("placement.launcher=slurm", "run.max_updates=40", "run.target_return=1e9")
    resume = ("--resume", found.name, *settings, "--json", "--require-target")
    with following(Submitted(cluster, tmp_path, found.name, *resume)) as again:
        assert 1 == again.end(START_S), again.output()
        assert 40 == json.loads(again.stdout)["updates"]


def test_a_run_is_changed_from_outside_its_job_and_an_interrupt_cancels_it_with_a_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its replay shards work on the other machine, and write into the checkpoint."""
    chosen = {**APEX, "cluster__replay": "nodes", "checkpoint__replay": True}
    with submitted(cluster, tmp_path, config="cartpole_apex", **chosen) as found:
        found.until_training()
        (node,) = found.document("/nodes")["nodes"]
        assert ("n2", ["replay-0", "replay-1"]) == (node["name"], node["shards"])
        done = call(
            cluster, "set", found.name, "balance.max_staleness=5", "--runs-dir", str(tmp_path)
        )
        assert 0 == done.returncode, done.stderr
        assert 5 == found.document()["staleness"]["bound"]
        found.process.send_signal(signal.SIGINT)
        assert 130 == found.end(), found.output()
        assert "SIGTERM: stopping with a last checkpoint" in found.stdout
        assert "cancelled" in found.stderr
        *_, last = sorted((found.directory / "checkpoints").glob("v*"))
        assert 2 == len(CheckpointStore.load(last).manifest["replay_files"])
        assert ("stopped", "SIGTERM") == summary(found)
        assert [] == list(found.directory.glob("join.toml"))


def test_a_second_interrupt_leaves_no_time_for_a_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    with submitted(cluster, tmp_path) as found:
        found.until_training()
        for pid in left(found.name):  # it would not end by itself
            os.kill(pid, signal.SIGSTOP)
        found.process.send_signal(signal.SIGINT)
        until("cancelled", lambda: "SIGINT: cancelling" in found.stderr, tell=found.output)
        found.process.send_signal(signal.SIGINT)
        assert 130 == found.end(KILL_WAIT_S / 2), found.output()


def test_a_job_that_is_requeued_and_preempted_continues_with_the_bound_that_was_set_live(
    cluster: Cluster, tmp_path: Path
) -> None:
    with submitted(cluster, tmp_path) as found:
        found.until_training()
        where = ("--runs-dir", str(tmp_path))
        assert 0 == call(cluster, "set", found.name, "balance.max_staleness=7", *where).returncode
        before, pid = found.updates(), found.pid
        cluster.call("scontrol", "requeue", found.job)
        resumed(cluster, found, before, pid, restarts=1)
        assert 7 == found.document()["staleness"]["bound"]
        (folder,) = [path for path in tmp_path.iterdir() if path.name.startswith("run-")]
        assert found.directory == folder

        found.until_training(found.updates() + 1)  # else there is nothing new to save
        saved = checkpoints(found)
        before, pid = found.updates(), found.pid
        urgent = cluster.call(
            *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"),
            *("--output=/dev/null", "--wrap=sleep 1"),
        ).strip()
        until("it waits", lambda: "PENDING" == cluster.states().get(found.job), tell=found.output)
        assert checkpoints(found) - saved
        until("the urgent job ran", lambda: urgent not in cluster.states(), tell=found.output)
        resumed(cluster, found, before, pid, restarts=2)
        assert 7 == found.document()["staleness"]["bound"]
        assert 0 == call(cluster, "stop", found.name, *where).returncode
        assert 0 == found.end(), found.output()


def checkpoint(cluster: Cluster, found: Submitted) -> None:
    """Let the run write a checkpoint."""
    done = call(cluster, "checkpoint", found.name, "--runs-dir", str(found.runs))
    assert 0 == done.returncode, done.stderr
    folder = found.directory / "checkpoints"
    until("a checkpoint", lambda: list(folder.glob("v*")), tell=found.output)


def checkpoints(found: Submitted) -> set[Path]:
    return set((found.directory / "checkpoints").glob("v*"))


def resumed(cluster: Cluster, found: Submitted, before: int, pid: int, *, restarts: int) -> None:
    """Wait until another head than ``pid`` trains; it continues after ``before`` updates."""

    def continues() -> bool:
        job = cluster.call("scontrol", "show", "job", "--oneliner", found.job)
        if "JobState=PENDING" in job and "BeginTime" in job:
            cluster.call("scontrol", "update", f"JobId={found.job}", "StartTime=now")
        again = re.search(r"Restarts=(\d+)", job)
        restarted = again is not None and int(again[1]) >= restarts
        return restarted and found.pid not in (0, pid) and found.updates() > before

    until("it continues", continues, within_s=START_S, tell=found.output)


def summary(found: Submitted) -> tuple[str, str]:
    document = json.loads((found.directory / "summary.json").read_text())
    return document["state"], document["reason"]


def test_a_machine_that_does_not_see_the_directory_of_runs_ends_the_job_with_its_name(
    cluster: Cluster,
) -> None:
    with submitted(cluster, cluster.hidden / "runs") as found:
        assert 2 == found.end(START_S), found.output()
        assert f"n2 does not see {cluster.hidden}/runs/.slurm/{found.name}" in found.stderr
        assert "choose a --runs-dir on a file system that all machines" in found.stderr


def test_words_of_slurm_are_shown_with_the_setting_that_is_at_fault(
    cluster: Cluster, tmp_path: Path
) -> None:
    for path, value, words in (
        ("slurm.partition", '"nowhere"', "Invalid partition name specified"),
        ("slurm.nodes", "7", "More processors requested"),
        ("slurm.time_limit", '"3-00:00:00"', "time limit"),
        ("slurm.extra", '["--nodelist=elsewhere"]', "Invalid node name"),
    ):
        settings = ("placement.launcher=slurm", "env.id=CartPole-v1", f"{path}={value}")
        done = call(
            cluster, "train", "cartpole_ppo", *settings, "--runs-dir", str(tmp_path / "runs")
        )
        assert 2 == done.returncode, done
        at = "placement.launcher" if path == "slurm.extra" else path
        assert f"{at} = " in done.stderr, done
        assert "Slurm refuses the job" in done.stderr
        assert words.lower() in done.stderr.lower(), done
    assert [] == [path for path in tmp_path.glob("runs/*") if path.name != ".slurm"]


@pytest.mark.beside
def test_a_job_that_reaches_its_time_limit_returns_to_the_queue_with_a_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    with submitted(
        cluster, tmp_path, slurm__partition="second", slurm__time_limit=2, slurm__stop_before_s=60
    ) as found:
        found.until_training()

        def returned() -> bool:
            job = cluster.call("scontrol", "show", "job", "--oneliner", found.job)
            return re.search(r"Restarts=[1-9]", job) is not None

        until("it is in the queue again", returned, tell=found.output)
        assert "SIGTERM: stopping with a last checkpoint" in found.stdout
        assert list((found.directory / "checkpoints").glob("v*"))
        found.process.send_signal(signal.SIGTERM)
        assert 143 == found.end(), found.output()


@pytest.mark.beside
def test_a_terminal_that_closes_leaves_the_job_which_ends_by_itself(
    cluster: Cluster, tmp_path: Path
) -> None:
    with submitted(cluster, tmp_path, slurm__partition="second") as found:
        found.until_training()
        found.process.send_signal(signal.SIGHUP)
        assert 129 == found.end(10), found.output()
        assert f"job {found.job} of run {found.name} continues" in found.stderr
        assert "RUNNING" == cluster.states()[found.job]
        before = found.updates()
        until("it trains", lambda: found.updates() > before, tell=found.output)
        resume = ("--resume", found.name, "placement.launcher=slurm", "--runs-dir", str(tmp_path))
        checkpoint(cluster, found)
        refused = call(cluster, "train", *resume)
        assert (2, True) == (refused.returncode, "is active at" in refused.stderr), refused
        assert 0 == call(cluster, "stop", found.name, "--runs-dir", str(tmp_path)).returncode
        until("it ended", lambda: found.job not in cluster.states(), tell=found.output)
        assert ("stopped", REQUESTED) == summary(found)


@pytest.mark.beside
def test_a_job_without_a_checkpoint_starts_again_when_it_is_requeued(
    cluster: Cluster, tmp_path: Path
) -> None:
    with submitted(
        cluster, tmp_path, slurm__partition="second", run__max_updates=10_000_000
    ) as found:
        found.until_training()
        (found.directory / "join.toml").chmod(0o400)
        for pid in left(found.name):  # no checkpoint is written
            os.kill(pid, signal.SIGKILL)
        until("it failed", lambda: found.process.poll() is not None, tell=found.output)
        assert [] == list((found.directory / "checkpoints").glob("v*"))
        # An operator requeues the job that has failed.
        cluster.call("scontrol", "requeue", found.job)
        cluster.call("scontrol", "update", f"JobId={found.job}", "StartTime=now")
        aside = found.directory.with_name(f"{found.name}.before-1")
        until("the old directory is aside", aside.is_dir, within_s=START_S, tell=found.output)
        until("it trains", lambda: found.updates() > 0, within_s=START_S, tell=found.output)
        cluster.call("scancel", found.job)
        until("it ended", lambda: found.job not in cluster.states(), tell=found.output)
