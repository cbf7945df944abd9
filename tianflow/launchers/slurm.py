"""The launcher ``slurm``: a run as one job of Slurm. The first machine is the head, the others are
nodes.

It runs nothing itself. `SlurmLauncher.job` writes a batch script; its steps are ``tianflow train``
with the launcher ``nodes`` and ``tianflow node``. `SlurmJob` submits, watches and cancels it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tianflow.config.loading import write_toml
from tianflow.config.model import ClusterSettings, HttpSettings
from tianflow.core.program import JobState, LauncherCapabilities
from tianflow.errors import ConfigError, Problem, RunError
from tianflow.rundir.join_file import NAME as JOIN_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tianflow.config.model import Config
    from tianflow.core.payloads import TrajectoryLayout
    from tianflow.interfaces import RunOrder, RunView, SlotOwner

PATH = "placement.launcher"
PROGRAM: tuple[str, ...] = (sys.executable, "-m", "tianflow")
"""How a machine of the job starts tianflow."""
CLUSTER, HTTP = ClusterSettings(), HttpSettings()
JOBS = ".slurm"
"""Folder in the directory of runs with a folder for each job's run."""
SCRIPT, CONFIG, JOB = "job.sh", "config.toml", "job.json"
ANSWER_S = 60.0
"""Longest time for a command of Slurm."""
PLAIN_PATH = re.compile(r"[^\x00-\x1f\"'\\%]+")
"""A path that a line of options can hold. ``%`` begins a pattern of Slurm."""
ACTIVE = frozenset(
    {
        "COMPLETING",
        "CONFIGURING",
        "PENDING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESIZING",
        "RESV_DEL_HOLD",
        "RUNNING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
    }
)
"""States of a job that may still run."""
UNKNOWN_JOB = "Invalid job id"
REFUSALS = {
    "account": "slurm.account",
    "partition": "slurm.partition",
    "time limit": "slurm.time_limit",
    "node count": "slurm.nodes",
    "node configuration": "slurm.nodes",
    "processors": "slurm.nodes",
    "generic resource": "slurm.gpus",
}
"""Words in a refusal of ``sbatch``, and the setting that is at fault."""

BODY = r"""
# Run {name}: its head on the first machine of this job, nodes on the others.
# Each machine has to see the directory of runs, and this Python at the same path.
runs={runs}
run=$runs/{name}
job=$runs/{jobs}/{name}
tianflow=({program})
head_options=({head_options})
node_options=({node_options})
arguments=({arguments})
export PYTHONUNBUFFERED=1

# A job that returned from the queue continues, or starts again if it has no checkpoint. The newest
# settings of the run count, with changes during the run.
start=({start})
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e "$run" ]; then
  if compgen -G "$run/checkpoints/v*" >/dev/null; then
    start=(--resume "$run")
  else
    [ ! -f "$run/{config}" ] || cp "$run/{config}" "$job/{config}"
    mv "$run" "$run.before-$SLURM_RESTART_COUNT"
  fi
fi

# A join file of an earlier head would lead nodes to a head that is gone.
rm -f "$run/{join}"

# Slurm sends SIGTERM to the steps as well. This shell waits until the head has its checkpoint.
trap : TERM

# The address of the head is known inside its step only.
srun "${{head_options[@]}}" bash -c '
  head=$SLURM_LAUNCH_NODE_IPADDR
  exec "$@"{here}' head "${{tianflow[@]}}" train "${{start[@]}}" "${{arguments[@]}}" &
head=$!

# Standard output is that of the head alone.
(
  srun "${{node_options[@]}}" bash -c '
    runs=$1 join=$2
    shift 2
    if [ ! -d "$runs" ]; then
      echo "tianflow: slurm: $SLURMD_NODENAME does not see $runs; choose a --runs-dir on a file" \
        "system that all machines of the job see" >&2
      exit 2
    fi
    exec "$@" node "$join" --once --in-job --name "$SLURMD_NODENAME"' \
    node "$job" "$run/{join}" "${{tianflow[@]}}" >&2
  code=$?
  # Every node was refused, so the head would wait for ever.
  [ "$code" -ne 2 ] || kill -TERM "$head"
  exit "$code"
) &
nodes=$!

until wait "$head"; code=$?; ! kill -0 "$head" 2>/dev/null; do :; done
if ! kill -0 "$nodes" 2>/dev/null; then
  wait "$nodes"
  [ $? -ne 2 ] || exit 2
fi
{again}exit "$code"
"""
AGAIN = r"""
# SIGTERM ended the head, and the job was not cancelled: it is preempted, or its time is over.
if [ "$code" -eq 143 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""


class SlurmLauncher:
    """`tianflow.interfaces.SubmitsRuns`: gives a whole run to Slurm."""

    capabilities = LauncherCapabilities(nodes=True)

    def job(self, order: RunOrder) -> SlurmJob:
        """The job of ``order``. Nothing is written or submitted.

        Raises:
            ConfigError: the script cannot hold a path.
        """
        return SlurmJob(order)

    def prepare(self) -> None:
        """Refuse to run here."""
        _refuse_to_run()

    def slots(
        self, *, config: Config, layout: TrajectoryLayout, draws: TrajectoryLayout | None
    ) -> SlotOwner:
        """Refuse to run here."""
        del config, layout, draws
        _refuse_to_run()

    async def launch(self, run: RunView, slots: Any) -> None:
        """Refuse to run here."""
        del run, slots
        _refuse_to_run()


def _refuse_to_run() -> NoReturn:
    message = "runs elsewhere, as a job that only `tianflow train` submits and follows"
    accepted = "`tianflow train CONFIG placement.launcher=slurm`, or another launcher"
    raise ConfigError([Problem(PATH, "slurm", message, accepted)])


class SlurmJob:
    """`tianflow.interfaces.BatchJob`: a run as a job of Slurm.

    Its script, its settings and its output lie in ``.slurm/NAME`` in the directory of runs.

    Args:
        order: the run, and the arguments of ``tianflow train``.
    """

    def __init__(self, order: RunOrder) -> None:
        self._order = order
        self._folder = order.runs_dir / JOBS / order.name
        self._number = ""
        for path in (order.runs_dir, Path.cwd()):
            if not PLAIN_PATH.fullmatch(str(path)):
                message = "has a character that a batch script of Slurm cannot hold"
                accepted = "a path without quotes, backslashes and %"
                raise ConfigError([Problem("--runs-dir", str(path), message, accepted)])

    def __str__(self) -> str:
        return f"job {self._number} of run {self._order.name}"

    # Script
    # ----------------------------------------------------------------------------------------------

    @property
    def script(self) -> str:
        """The batch script."""
        config, order = self._order.config, self._order
        slurm = config.slurm
        sized = () if slurm.cpus_per_node is None else (f"--cpus-per-task={slurm.cpus_per_node}",)
        nodes = slurm.nodes - 1
        body = BODY.format(
            name=order.name,
            runs=shlex.quote(str(order.runs_dir)),
            jobs=JOBS,
            config=CONFIG,
            join=JOIN_FILE,
            program=shlex.join(PROGRAM),
            # Since Slurm 22.05 a step does not inherit the CPUs of a task.
            head_options=shlex.join(("--nodes=1", "--ntasks=1", "--relative=0", *sized)),
            node_options=shlex.join(
                (
                    f"--nodes={nodes}",
                    f"--ntasks={nodes}",
                    "--relative=1",
                    "--label",
                    "--no-kill",
                    "--kill-on-bad-exit=0",
                    *sized,
                )
            ),
            start=" ".join(self._start()),
            arguments=shlex.join(self._arguments()),
            here="".join(f" {setting}" for setting in self._settings_of_head()),
            again=AGAIN if slurm.requeue else "",
        )
        return "\n".join(["#!/bin/bash", *(f"#SBATCH {text}" for text in self._options())]) + body

    def _options(self) -> Iterator[str]:
        """Options of ``sbatch``, as lines of the script."""
        slurm, order = self._order.config.slurm, self._order
        yield f"--job-name={order.name}"
        yield f"--nodes={slurm.nodes}"
        yield "--ntasks-per-node=1"
        given = {
            "cpus-per-task": slurm.cpus_per_node,
            "gpus-per-node": slurm.gpus or None,
            "partition": slurm.partition,
            "account": slurm.account,
            "time": slurm.time_limit,
        }
        yield from (f"--{name}={value}" for name, value in given.items() if value is not None)
        yield f"--signal=TERM@{slurm.stop_before_s}"
        yield "--requeue" if slurm.requeue else "--no-requeue"
        yield "--no-kill"
        yield "--open-mode=append"
        yield f'--chdir="{Path.cwd()}"'
        yield f'--output="{self._folder}/%j.out"'
        yield f'--error="{self._folder}/%j.err"'
        yield from slurm.extra

    def _start(self) -> Iterator[str]:
        """Arguments of ``train`` at the first start of the job, as the shell reads them."""
        yield f'"$job/{CONFIG}"'
        if self._order.resume is not None:
            yield f"--resume {shlex.quote(self._order.resume)}"

    def _arguments(self) -> Iterator[str]:
        """Arguments of ``train`` at every start."""
        order = self._order
        yield from ("--plain", "--runs-dir", str(order.runs_dir), *order.arguments)
        yield f"run.name={order.name}"
        yield "placement.launcher=nodes"

    def _settings_of_head(self) -> Iterator[str]:
        """Settings with the address of the head, as the shell of its step reads them. An address
        that the config has stays.
        """
        if self._order.config.http.host == HTTP.host:
            yield "http.host=$head"
        cluster = self._order.config.cluster
        if (cluster.listen, cluster.address) == (CLUSTER.listen, CLUSTER.address):
            yield '"cluster.listen=tcp://$head:*"'

    # Submission
    # ----------------------------------------------------------------------------------------------

    def submit(self) -> str:
        """Write the script and submit it. The number of the job.

        Raises:
            ConfigError: Slurm is not installed here, or refuses the job; in its words.
            RunError: an earlier job of the run is active.
        """
        if (missing := next((c for c in COMMANDS if shutil.which(c) is None), None)) is not None:
            message = f"{missing} is not installed here, so no job can be submitted"
            accepted = (
                "a machine with the commands of Slurm, such as a login node (Debian: slurm-client)"
            )
            raise ConfigError([Problem(PATH, "slurm", message, accepted)])
        self._require_no_other()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_toml(self._folder / CONFIG, self._order.config)
        script = self._folder / SCRIPT
        script.write_text(self.script, encoding="utf-8")
        done = _call("sbatch", "--parsable", str(script))
        if done.returncode:
            raise ConfigError([_refusal(done.stderr, self._order.config)])
        # With several clusters, the name of the cluster follows the number.
        self._number = done.stdout.strip().partition(";")[0]
        (self._folder / JOB).write_text(json.dumps({"job": self._number}), encoding="utf-8")
        return self._number

    def _require_no_other(self) -> None:
        try:
            number = json.loads((self._folder / JOB).read_text(encoding="utf-8"))["job"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        other = SlurmJob(self._order)
        other._number = str(number)
        state = other.state()
        if not state.ended:
            raise RunError(
                "slurm",
                f"{other} is {state.text}; cancel it first (scancel {number}), or choose another "
                "run.name",
            )

    # Life
    # ----------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self._order.runs_dir / self._order.name

    @property
    def outputs(self) -> tuple[Path, Path]:
        """Files with the output of the job: standard output, standard error."""
        return self._folder / f"{self._number}.out", self._folder / f"{self._number}.err"

    def state(self) -> JobState:
        """The state of the job. While Slurm does not answer, it is unknown, and the job active."""
        done = _call("scontrol", "show", "job", "--oneliner", self._number)
        if done.returncode:
            if UNKNOWN_JOB in done.stderr:  # Slurm has forgotten it: it ended long ago
                return JobState("not known to Slurm any more", ended=True, code=1)
            return JobState(f"not known: {_words(done.stderr)}")
        fields = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
        name, reason = fields.get("JobState", ""), fields.get("Reason", "None")
        code, _, number = fields.get("ExitCode", "0:0").partition(":")
        text = name.lower().replace("_", " ")
        waits = name == "PENDING" and reason != "None"
        if name in ACTIVE:
            return JobState(f"{text} ({reason})" if waits else text)
        failed = int(code) or (128 + int(number) if int(number or 0) else 1)
        return JobState(text, ended=True, code=0 if name == "COMPLETED" else failed)

    def cancel(self, *, now: bool) -> None:
        """End the job. With ``now`` without time for a last checkpoint."""
        _call("scancel", *(("--signal=KILL", "--full") if now else ()), self._number)


COMMANDS = ("sbatch", "scontrol", "scancel")


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Its messages stay in English, without a prefix of time."""
    try:
        return subprocess.run(  # noqa: S603 - of Slurm, with arguments of the user
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {ANSWER_S:g} s")


def _words(text: str) -> str:
    """Messages of Slurm as one line."""
    lines = (re.sub(r"^\w+: (error: )?", "", line.strip()) for line in text.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))


def _refusal(text: str, config: Config) -> Problem:
    words = _words(text)
    path = next((path for word, path in REFUSALS.items() if word in words.lower()), PATH)
    section, _, key = path.partition(".")
    return Problem(path, getattr(getattr(config, section), key), f"Slurm refuses the job: {words}")
