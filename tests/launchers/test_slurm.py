"""Jobs of Slurm without a Slurm: the script, what is refused, and what is read from its answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.checkpoints import checkpoint
from tests.support.paths import DATA
from tianflow import api
from tianflow.cli.main import app
from tianflow.config.engines import seconds
from tianflow.config.loading import load_config
from tianflow.core.program import JobState
from tianflow.errors import CheckpointError, ConfigError, RunError
from tianflow.interfaces import RunOrder, SubmitsRuns
from tianflow.launchers import slurm
from tianflow.launchers.slurm import SlurmJob, SlurmLauncher

GOLDEN = DATA / "slurm.sh"
Answer = tuple[int, str, str]


def job(runs: Path, *overrides: str, resume: str | None = None, name: str = "demo") -> SlurmJob:
    config = load_config("cartpole_ppo", ["placement.launcher=slurm", *overrides])
    return SlurmJob(RunOrder(config, name, runs, resume, ("--json",)))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[tuple[str, ...]]]:
    """Makes every command of Slurm give one answer; the commands that were called."""

    def install(answer: Answer) -> list[tuple[str, ...]]:
        called: list[tuple[str, ...]] = []

        def call(*command: str) -> subprocess.CompletedProcess[str]:
            called.append(command)
            return subprocess.CompletedProcess(command, *answer)

        monkeypatch.setattr(slurm, "_call", call)
        monkeypatch.setattr(shutil, "which", lambda command: f"/usr/bin/{command}")
        return called

    return install


# Script
# --------------------------------------------------------------------------------------------------


def test_the_script_has_every_resource_and_starts_head_and_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "PROGRAM", ("/opt/tianflow/bin/python", "-m", "tianflow"))
    monkeypatch.chdir("/")
    options = [
        *("slurm.partition=gpu", "slurm.account=lab", "slurm.nodes=5", "slurm.cpus_per_node=16"),
        *("slurm.gpus=2", "slurm.time_limit=2-12:00:00", "slurm.stop_before_s=120"),
        'slurm.extra=["--qos=high", "--mem=0"]',
    ]
    assert GOLDEN.read_text() == job(Path("/shared/my runs"), *options).script


def test_the_script_is_valid_for_the_shell() -> None:
    done = subprocess.run(["bash", "-n", GOLDEN], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


def test_settings_without_a_value_are_those_of_the_cluster() -> None:
    options = [
        line.split()[1].partition("=")[0]
        for line in job(Path("/runs"), "slurm.requeue=false").script.splitlines()
        if line.startswith("#SBATCH")
    ]
    assert [
        *("--job-name", "--nodes", "--ntasks-per-node", "--signal", "--no-requeue", "--no-kill"),
        *("--open-mode", "--chdir", "--output", "--error"),
    ] == options


def test_a_job_without_requeue_never_requeues_itself() -> None:
    assert "scontrol requeue" in job(Path("/runs")).script
    assert "scontrol requeue" not in job(Path("/runs"), "slurm.requeue=false").script


def test_addresses_are_those_of_the_head_unless_the_config_has_them() -> None:
    default = job(Path("/runs")).script
    assert 'http.host=$head "cluster.listen=tcp://$head:*"' in default
    given = job(Path("/runs"), "http.host=0.0.0.0", "cluster.address=head.example").script
    assert "http.host" not in given
    assert "cluster.listen" not in given


def test_a_resumed_run_starts_from_its_checkpoint_and_with_its_settings() -> None:
    script = job(Path("/runs"), resume="/runs/my demo/checkpoints/v1-3").script
    assert """start=("$job/config.toml" --resume '/runs/my demo/checkpoints/v1-3')""" in script


@pytest.mark.parametrize("sign", ['"', "'", "\\", "%", "\n"])
def test_a_path_that_a_line_of_options_cannot_hold_is_refused(sign: str) -> None:
    with pytest.raises(ConfigError, match="--runs-dir = .*has a character"):
        job(Path(f"/a{sign}b"))


# Settings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("slurm.knodes=3", "slurm.knodes = 3: is not a setting.*did you mean 'nodes'"),
        ("slurm.nodes=1", "slurm.nodes = 1: .*>= 2"),
        ("slurm.time_limit=12:61:00", "slurm.time_limit = '12:61:00'"),
        ("slurm.time_limit=0", "slurm.time_limit = 0"),
        ("slurm.partition=a b", "slurm.partition = 'a b'"),
        ('slurm.extra=["qos=high"]', "slurm.extra"),
        ('slurm.extra=["--qos=high\\nrm -r x"]', "slurm.extra"),
        ("slurm.time_limit=1", "slurm.stop_before_s = 60: the time limit is 60 s"),
        ('slurm.extra=["-N4"]', "slurm.extra = '-N4': .*accepted: slurm.nodes"),
        ('slurm.extra=["--time 4"]', "slurm.extra = '--time 4': .*accepted: slurm.time_limit"),
        ('slurm.extra=["--output=x"]', "slurm.extra = '--output=x': .*accepted: other options"),
    ],
)
def test_a_setting_that_no_job_could_have_is_refused_by_its_path(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("cartpole_ppo", [override])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("90", 90),
        ("12:00:00", "12:00:00"),
        ("30:00", "30:00"),
        ("2-12", "2-12"),
        ("1-00:30", "1-00:30"),
    ],
)
def test_a_time_limit_is_written_as_slurm_reads_it(text: str, value: object) -> None:
    config = load_config("cartpole_ppo", [f"slurm.time_limit={text}"])
    assert value == config.slurm.time_limit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (90, 5400),
        ("90", 5400),
        ("1:30", 90),
        ("1:00:30", 3630),
        ("1-2", 93_600),
        ("1-2:03", 93_780),
        ("1-2:03:04", 93_784),
    ],
)
def test_a_time_limit_has_the_seconds_of_slurm(text: int | str, expected: int) -> None:
    assert expected == seconds(text)


# Runs
# --------------------------------------------------------------------------------------------------


def test_only_train_submits_a_run() -> None:
    config = load_config("cartpole_ppo", ["placement.launcher=slurm"])
    assert isinstance(SlurmLauncher(), SubmitsRuns)
    with pytest.raises(ConfigError, match="runs elsewhere.*`tianflow train` submits"):
        api.train(config)


def test_a_run_on_this_machine_is_not_a_job(tmp_path: Path) -> None:
    assert api.batch_job(load_config("cartpole_ppo"), None, tmp_path, ()) is None
    done = CliRunner().invoke(app, ["train", "cartpole_ppo", "--dry-run"])
    assert (2, True) == (done.exit_code, "processes submits no job" in done.stderr)


def test_a_dry_run_prints_the_script_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = ["cartpole_ppo", "placement.launcher=slurm", "run.name=demo"]
    done = CliRunner().invoke(app, ["train", *arguments, "--dry-run", "--runs-dir", str(tmp_path)])
    assert (0, True) == (done.exit_code, done.stdout.startswith("#!/bin/bash\n#SBATCH "))
    assert [] == list(tmp_path.iterdir())


def test_the_end_of_standard_input_does_not_reach_a_job(tmp_path: Path) -> None:
    arguments = ["cartpole_ppo", "placement.launcher=slurm", "--until-eof"]
    done = CliRunner().invoke(app, ["train", *arguments, "--runs-dir", str(tmp_path)])
    assert (2, True) == (done.exit_code, "not the job" in done.stderr)
    assert [] == list(tmp_path.iterdir())


def test_a_directory_that_is_taken_is_refused_before_a_job_waits(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.toml").touch()
    config = load_config("cartpole_ppo", ["placement.launcher=slurm", "run.name=demo"])
    with pytest.raises(CheckpointError, match="exists; choose another run.name"):
        api.batch_job(config, None, tmp_path, ())


def resumable(folder: Path) -> Path:
    """The directory of a run that can continue."""
    path = checkpoint(folder, {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest |= {"samples": 0, "episodes": 0, "elapsed_s": 0.0}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path.parent.parent


def test_a_resume_that_does_not_fit_its_checkpoint_is_refused_before_a_job_waits(
    tmp_path: Path, answers: Callable[[Answer], list[tuple[str, ...]]]
) -> None:
    called = answers((0, "15", ""))
    run = resumable(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--resume", str(run), "network.hidden=[9]", "placement.launcher=slurm"]
    done = CliRunner().invoke(app, ["train", *arguments, "--runs-dir", str(tmp_path)])
    assert (2, True) == (done.exit_code, "network.hidden" in done.stderr), done.output
    assert ([], before) == (called, sorted(tmp_path.rglob("*")))


# Submission
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", slurm.COMMANDS)
def test_slurm_that_is_not_installed_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda found: None if found == command else found)
    with pytest.raises(ConfigError, match=f"{command} is not installed.*Debian: slurm-client"):
        job(tmp_path).submit()
    assert [] == list(tmp_path.iterdir())


def test_a_submitted_job_leaves_its_script_and_settings_for_the_owner_only(
    answers: Callable[[Answer], list[tuple[str, ...]]], tmp_path: Path
) -> None:
    called = answers((0, "17;cluster\n", ""))
    submitted = job(tmp_path)
    assert "17" == submitted.submit()
    assert "job 17 of run demo" == str(submitted)
    folder = tmp_path / ".slurm" / "demo"
    assert [("sbatch", "--parsable", str(folder / "job.sh"))] == called
    assert submitted.script == (folder / "job.sh").read_text()
    assert (0o700, 0o600) == tuple(
        path.stat().st_mode & 0o777 for path in (folder, folder / "config.toml")
    )
    assert (folder / "17.out", folder / "17.err") == submitted.outputs
    assert "slurm" == load_config(folder / "config.toml").placement.launcher


SUBMISSION = "sbatch: error: Batch job submission failed: "
REFUSED = {
    "slurm.account = 'lab'": "Invalid account or account/partition combination specified",
    "slurm.partition = 'nowhere'": "Invalid partition name specified",
    "slurm.nodes = 2": "Requested node configuration is not available",
    "placement.launcher = 'slurm'": "Unable to contact slurm controller (connect failure)",
}


@pytest.mark.parametrize(("problem", "words"), REFUSED.items())
def test_a_refusal_has_the_words_of_slurm_and_the_setting(
    answers: Callable[[Answer], list[tuple[str, ...]]], tmp_path: Path, problem: str, words: str
) -> None:
    answers((1, "", f"sbatch: error: first line\n{SUBMISSION}{words}\n"))
    with pytest.raises(ConfigError) as caught:
        job(tmp_path, "slurm.account=lab", "slurm.partition=nowhere").submit()
    said = f"Slurm refuses the job: first line; Batch job submission failed: {words}"
    assert f"{problem}: {said}" == str(caught.value)


def test_a_second_job_of_a_run_is_refused_while_the_first_may_run(
    answers: Callable[[Answer], list[tuple[str, ...]]], tmp_path: Path
) -> None:
    folder = tmp_path / ".slurm" / "demo"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"job": "16"}))
    answers((0, "JobId=16 JobName=demo JobState=PENDING Reason=Resources ExitCode=0:0", ""))
    with pytest.raises(RunError, match=r"job 16 of run demo is pending \(Resources\).*scancel 16"):
        job(tmp_path).submit()
    assert not (folder / "job.sh").exists()


# State
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("JobState=PENDING Reason=Priority ExitCode=0:0", JobState("pending (Priority)")),
        ("JobState=PENDING Reason=None ExitCode=0:0", JobState("pending")),
        ("JobState=RUNNING Reason=None ExitCode=0:0", JobState("running")),
        ("JobState=COMPLETING Reason=None ExitCode=0:0", JobState("completing")),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", JobState("completed", ended=True)),
        (
            "JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0",
            JobState("failed", ended=True, code=2),
        ),
        (
            "JobState=CANCELLED Reason=None ExitCode=0:15",
            JobState("cancelled", ended=True, code=143),
        ),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", JobState("timeout", ended=True, code=1)),
        (
            "JobState=OUT_OF_MEMORY Reason=None ExitCode=0:125",
            JobState("out of memory", ended=True, code=253),
        ),
    ],
)
def test_the_state_of_a_job_is_that_of_slurm(
    answers: Callable[[Answer], list[tuple[str, ...]]],
    tmp_path: Path,
    answer: str,
    state: JobState,
) -> None:
    answers((0, f"JobId=1 JobName=demo {answer}\n", ""))
    assert state == job(tmp_path).state()


def test_a_job_that_slurm_has_forgotten_has_ended_and_silence_ends_no_job(
    answers: Callable[[Answer], list[tuple[str, ...]]], tmp_path: Path
) -> None:
    answers((1, "", "slurm_load_jobs error: Invalid job id specified\n"))
    assert (True, 1) == (job(tmp_path).state().ended, job(tmp_path).state().code)
    answers((1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"))
    assert (
        JobState("not known: slurm_load_jobs error: Unable to contact slurm controller")
        == job(tmp_path).state()
    )
