"""A real Slurm on this machine: a controller, four machines ``n1`` to ``n4``, and munge, all with
files and ports of their own.

The partition ``main`` has the machines ``n1`` and ``n2``, and ``second`` the others. All are daemons on
one host, so they share its file systems. A folder in `Cluster.hidden` is seen by all but ``n2``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tianflow.core.process_table import carries, processes

COMMANDS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
NODES = ("n1", "n2", "n3", "n4")
START_S = 60.0
END_S = 30.0
POLL_S = 0.05
KILL_WAIT_S = 20
"""Seconds between SIGTERM and SIGKILL of a job: time for a last checkpoint."""
SETTINGS = """
ClusterName=tianflow
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job waits until its credential has expired: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
KillWait={kill_wait}
MinJobAge=300
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs={cpus}
NodeName=n4 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[4]} CPUs={cpus}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=60 PriorityTier=1 GraceTime={kill_wait}
PartitionName=second Nodes=n[3-4] MaxTime=60 PriorityTier=1 GraceTime={kill_wait}
PartitionName=urgent Nodes=n[1-2] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


class SlurmError(AssertionError):
    """Slurm did not start, or a command of it failed."""


def missing() -> str:
    """The reason why no Slurm can be started here; "" if one can."""
    for command, package in COMMANDS.items():
        if shutil.which(command) is None:
            return f"{command} (Debian: {package}) is not installed"
    return "" if os.geteuid() == 0 else "only root may start slurmd"


def require_slurm() -> None:
    """Skip the test where Slurm cannot be started."""
    if reason := missing():
        pytest.skip(reason)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(found.getsockname()[1]) for found in sockets]
    for found in sockets:
        found.close()
    return ports


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs. ``environment`` leads its commands to it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that use it."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def hidden(self) -> Path:
        """A folder that ``n2`` sees empty."""
        return self.folder / "hidden"

    def call(self, *command: str, timeout: float = END_S) -> str:
        """Output of a command of Slurm."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(command)}: {done.stderr}\n{self.logs()}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """Every job that has not ended, and its state."""
        lines = self.call("squeue", "-h", "-o", "%i %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def logs(self) -> str:
        """Ends of all logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """A Slurm with its files in ``folder``. None of its processes and jobs is left afterwards."""
    cluster = Cluster(folder)
    for name in ("state", "hidden", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    text = SETTINGS.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        ports=free_ports(1 + len(NODES)),
        cpus=os.cpu_count(),
        kill_wait=KILL_WAIT_S,
    )
    (folder / "slurm.conf").write_text(text)
    started: list[subprocess.Popen[bytes]] = []
    try:
        _start(cluster, started)
        yield cluster
    finally:
        _end(cluster, started)


def _start(cluster: Cluster, started: list[subprocess.Popen[bytes]]) -> None:
    folder = cluster.folder
    munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "seed-file")]
    hide = f'mount -t tmpfs none "{cluster.hidden}" && exec slurmd -D -N n2'
    daemons = {
        "munged": [
            *("munged", "--foreground", "--force", *munge),
            *(f"--key-file={folder}/munge.key", f"--log-file={folder}/munged.log"),
        ],
        "slurmctld": ["slurmctld", "-D", "-i"],
        **{name: ["slurmd", "-D", "-N", name] for name in NODES},
        "n2": ["unshare", "--mount", "sh", "-c", hide],
    }
    for name, command in daemons.items():
        with (folder / f"{name}-output.log").open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],  # tests may be killed
                env=cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)
        if name == "munged":
            _until(cluster, "munge listens", (folder / "munge.socket").exists)
    _until(cluster, "all machines are idle", lambda: _idle(cluster) == len(NODES))


def _idle(cluster: Cluster) -> int:
    with suppress(SlurmError):
        return len(
            cluster.call("sinfo", "-h", "-N", "-p", "main,second", "-t", "idle", "-o", "%N").split()
        )
    return 0


def _until(cluster: Cluster, what: str, condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise SlurmError(f"not within {START_S:g} s: {what}\n{cluster.logs()}")
        time.sleep(POLL_S)


def _end(cluster: Cluster, started: list[subprocess.Popen[bytes]]) -> None:
    with suppress(SlurmError, subprocess.TimeoutExpired):
        cluster.call("scancel", "--signal=KILL", "--full", "--user=root")
        cluster.call("scancel", "--user=root")
    for process in reversed(started):
        process.terminate()
    for process in reversed(started):
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in children(cluster):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(cluster: Cluster) -> list[int]:
    """Processes that Slurm has started, and commands of it."""
    conf = cluster.environment["SLURM_CONF"]
    return [
        entry.pid
        for entry in processes()
        if entry.state not in "ZX"
        and entry.pid != os.getpid()
        and carries(entry.pid, "SLURM_CONF", conf)
    ]


def tianflow(*arguments: str) -> list[str]:
    """A command of tianflow that follows jobs closely."""
    return [sys.executable, "-m", "tests.support.slurm_program", *arguments]
