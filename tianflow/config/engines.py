"""Settings models of the engines that provide machines for a run: Slurm and Ray."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, PositiveInt

from tianflow.config.section import Section
from tianflow.errors import Problem

CLUSTER = r"^(auto|local|(\[[0-9A-Fa-f:.]{1,64}\]|[^\s:/\[\]]{1,255}):\d{1,5})$"
"""Address of a cluster of Ray. A client of Ray (ray://) could not start a node."""
TIME = r"^(\d+(:[0-5]\d){0,2}|\d+-\d{1,2}(:[0-5]\d){0,2})$"
"""Times that Slurm reads: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
WORD = r"^[^\s\"'\\%#]+$"
OPTION = r"^-[^\r\n]*$"
"""An option of ``sbatch``. A line feed would begin a command of the script."""

OWN_OPTIONS = {
    "-J --job-name": "run.name",
    "-N --nodes": "slurm.nodes",
    "-c --cpus-per-task": "slurm.cpus_per_node",
    "-G --gpus --gpus-per-node": "slurm.gpus",
    "-p --partition": "slurm.partition",
    "-A --account": "slurm.account",
    "-t --time": "slurm.time_limit",
    "--signal": "slurm.stop_before_s",
    "--requeue --no-requeue": "slurm.requeue",
    "-D --chdir -o --output -e --error --open-mode": "",
    "-n --ntasks --ntasks-per-node -a --array -k --no-kill --wrap --parsable": "",
}
"""Options of the script, and the setting of each. A job would not work with others."""

Word = Annotated[str, Field(pattern=WORD)]
Option = Annotated[str, Field(pattern=OPTION)]


class RaySettings(Section):
    """Cluster and nodes, for ``placement.launcher = "ray"``."""

    address: Annotated[str, Field(pattern=CLUSTER)] = "auto"
    """Cluster of Ray. auto: the one of this machine; local: a new one on this machine, for the run;
    or HOST:PORT of its head.
    """
    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of nodes of actors, on different machines as far as there are enough."""
    cpus_per_node: PositiveInt = 1
    """Number of CPUs that a node reserves. Its actors share as many cores."""


class SlurmSettings(Section):
    """Resources of the job, for ``placement.launcher = "slurm"``."""

    partition: Word | None = None
    """Partition; None: the default one of the cluster."""
    account: Word | None = None
    """Account that the job is charged to; None: the default one of the user."""
    nodes: Annotated[int, Field(ge=2, le=4096)] = 2
    """Number of machines: the head, which learns, and at least one node, which acts."""
    cpus_per_node: PositiveInt | None = None
    """Number of CPUs on each machine; None: the default of the cluster."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs on each machine. The learner uses those of the head."""
    time_limit: Annotated[int, Field(gt=0)] | Annotated[str, Field(pattern=TIME)] | None = None
    """Time limit: minutes, or text such as "12:00:00" or "2-00:00:00"; None: that of the
    partition.
    """
    stop_before_s: PositiveInt = 60
    """Seconds before the time limit at which the run stops with a last checkpoint."""
    requeue: bool = True
    """Return of the job to the queue when it is preempted, when a machine fails, or before its time
    limit. The run then resumes from its newest checkpoint.
    """
    extra: tuple[Option, ...] = ()
    """Further options of ``sbatch``, one a line of the script, for example "--qos=high"."""


def seconds(time_limit: int | str) -> int:
    """A time limit as Slurm reads it: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = str(time_limit).rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, minutes, secs = [0, *parts, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def check_job(slurm: SlurmSettings) -> list[Problem]:
    """Problems of the time limit, and of further options that the script has already."""
    problems = []
    limit = None if slurm.time_limit is None else seconds(slurm.time_limit)
    if limit is not None and limit <= slurm.stop_before_s:
        message = (
            f"the time limit is {limit} s, so the run would stop as soon as it starts, and would "
            "return to the queue again and again"
        )
        accepted = "less than slurm.time_limit"
        problems.append(Problem("slurm.stop_before_s", slurm.stop_before_s, message, accepted))
    owners = {word: owner for words, owner in OWN_OPTIONS.items() for word in words.split()}
    for option in slurm.extra:
        name = re.split(r"[=\s]", option, maxsplit=1)[0]
        if name[:2] != "--":
            name = name[:2]  # the value may follow without a space
        if name in owners:
            message = f"the script has {name} already, and the last one would count"
            owner = owners[name]
            problems.append(Problem("slurm.extra", option, message, owner or "other options"))
    return problems
