"""The unit under a real systemd: started at boot, restarted, killed and rebooted with a run going
on, which goes on each time.

systemd is PID 1 of a container of systemd-nspawn. Its root is this machine's ``/usr`` and little
else, and neither is written to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.documents.test_deploy import UNIT
from tests.e2e.harness import ROOT, SMALL, START_S, assignment, until
from tianflow.core.process_table import processes
from tianflow.rundir.history import NAME

RUNS = "/var/lib/tianflow/runs"
REBOOTS = 133
"""How systemd-nspawn ends when it is to be started again."""
LIBRARIES = "LD_LIBRARY_PATH=/opt/python/lib"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("systemd-nspawn") is None,
        reason="systemd-nspawn (Debian: systemd-container) is not installed",
    ),
    pytest.mark.skipif(
        not Path("/usr/lib/systemd/systemd").exists(), reason="systemd is not installed"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may boot a container"),
]


def root(folder: Path) -> Path:
    """A root to boot: the unit, enabled, and a virtual environment at ``/opt/tianflow`` whose
    packages are those of this one.
    """
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "opt" / "tianflow" / "lib" / python / "site-packages"
    units = folder / "etc" / "systemd" / "system"
    for path in (
        packages,
        folder / "opt" / "tianflow" / "bin",
        units / "tianflow.service.d",
        units / "multi-user.target.wants",
    ):
        path.mkdir(parents=True)
    for name in ("usr", "var", "run", "tmp", "proc", "sys", "dev", "root"):
        (folder / name).mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "etc" / "os-release").write_text("ID=test\n")
    (folder / "etc" / "machine-id").touch()
    (folder / "etc" / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n"
    )
    (folder / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (packages / "here.pth").write_text("/opt/source\n/opt/source/controllers\n/opt/packages\n")
    (folder / "opt" / "tianflow" / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    (folder / "opt" / "tianflow" / "bin" / "python").symlink_to(f"/opt/python/bin/{python}")
    program = folder / "opt" / "tianflow" / "bin" / "tianflow"
    program.write_text(
        "#!/opt/tianflow/bin/python\nimport sys\nfrom tianflow.cli.main import "
        "main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    shutil.copy(UNIT, units)
    (units / "multi-user.target.wants" / UNIT.name).symlink_to(f"../{UNIT.name}")
    (units / "tianflow.service.d" / "here.conf").write_text(f"[Service]\nEnvironment={LIBRARIES}\n")
    return folder


class Machine:
    """A booted root."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder.parent / "console.log"
        self.boot()

    def boot(self) -> None:
        shown = {
            "/usr": "/usr",
            sys.base_prefix: "/opt/python",
            sysconfig.get_path("purelib"): "/opt/packages",
            str(ROOT): "/opt/source",
        }
        command = [
            *(
                "systemd-nspawn",
                "--quiet",
                "--register=no",
                "--keep-unit",
                "--settings=no",
                "--private-network",
                "--console=pipe",
            ),
            *(f"--directory={self.folder}", f"--machine=tianflow-{os.getpid()}", "--boot"),
            *(f"--bind-ro={source}:{target}" for source, target in shown.items()),
            "systemd.unit=multi-user.target",
        ]
        with self.log.open("a") as log:
            # the cgroups of today; with those of before, systemd in a container is not told when a
            # unit's last process is gone
            environment = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        until(
            "it has booted",
            lambda: self.state() in {"running", "degraded"},
            within_s=START_S,
            tell=self.log.read_text,
        )

    def leader(self) -> int:
        """PID 1 of the container, as seen from here; 0 while there is none."""
        return next((entry.pid for entry in processes() if entry.parent == self.process.pid), 0)

    def does(self, *command: str, check: bool = True) -> str:
        entered = [
            "nsenter",
            "-t",
            str(self.leader()),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "-C",
            "env",
            LIBRARIES,
            *command,
        ]
        done = subprocess.run(entered, text=True, capture_output=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self) -> str:
        return (
            self.does("systemctl", "is-system-running", check=False).strip()
            if self.leader()
            else ""
        )

    def shows(self, name: str) -> str:
        """A property of the service."""
        return self.does("systemctl", "show", "tianflow", "--value", "-p", name).strip()

    def tianflow(self, *words: str, check: bool = True) -> str:
        return self.does("/opt/tianflow/bin/tianflow", *words, "--runs-dir", RUNS, check=check)

    def until_trained(self, number: int, *, since: float = 0.0) -> None:
        """Until the one run has made so many updates, the last of them after ``since`` in Unix
        time, as the command line tells then. It is asked once: each time it needs half a second of
        a core.
        """

        def trained() -> bool:
            last_line = self.does("tail", "-n1", f"{RUNS}/kept/{NAME}", check=False)
            row = (
                json.loads(last_line) if last_line.endswith("\n") else {"time": -1.0, "updates": -1}
            )
            return bool(row["time"] > since and row["updates"] >= number)

        until(f"{number} updates", trained, within_s=START_S, tell=self.journal)
        (entry,) = json.loads(self.tianflow("status", "--json"))
        assert number <= entry["progress"]["updates"]

    def journal(self) -> str:
        return self.does("journalctl", "--no-pager", "-u", "tianflow", check=False)

    def saved(self) -> int:
        """Number of the newest checkpoint, 0 without one."""
        listed = self.does("ls", f"{RUNS}/kept/checkpoints", check=False)
        return max((int(number) for number in re.findall(r"v\d+-(\d+)\b", listed)), default=0)

    def ends(self, *, with_code: int) -> None:
        assert self.process.wait(START_S) == with_code, self.log.read_text()


@contextmanager
def booted(folder: Path) -> Iterator[Machine]:
    machine = Machine(root(folder))
    try:
        yield machine
    finally:
        if leader := machine.leader():
            os.kill(leader, signal.SIGKILL)
        machine.process.wait(START_S)


def test_a_run_outlives_restart_kill_and_reboot_of_its_service(tmp_path: Path) -> None:
    with booted(tmp_path / "root") as machine:
        until(
            "it answers",
            lambda: "serving at" in machine.journal(),
            within_s=START_S,
            tell=machine.journal,
        )
        settings = {
            **SMALL,
            "env.id": "CartPole-v1",  # tests are not installed there
            "learner.slowdown": 20.0,  # it leaves the cores to others
            "run.name": "kept",
        }
        machine.tianflow(
            "submit", "cartpole_ppo", *(assignment(path, value) for path, value in settings.items())
        )
        machine.until_trained(4)
        assert "700" == machine.does("stat", "-Lc", "%a", "/var/lib/tianflow").strip()

        machine.does("systemctl", "restart", "tianflow")
        saved = machine.saved()
        assert saved >= 4
        machine.until_trained(saved + 1)

        machine.does("systemctl", "kill", "--signal=KILL", "--kill-who=main", "tianflow")
        until(
            "it was started again",
            lambda: machine.shows("NRestarts") == "1",
            within_s=START_S,
            tell=machine.journal,
        )
        # systemd has ended all processes of the killed service
        machine.until_trained(saved + 1, since=time.time())

        machine.does("systemctl", "reboot")
        machine.ends(with_code=REBOOTS)
        machine.boot()
        kept = machine.saved()
        assert kept > saved, "it was stopped with a checkpoint"
        machine.until_trained(kept + 1)

        machine.does("systemctl", "stop", "tianflow")
        assert ("inactive", "success") == (machine.shows("ActiveState"), machine.shows("Result")), (
            "nothing had to be killed"
        )
        assert machine.saved() > kept
        machine.does("systemctl", "poweroff")
        machine.ends(with_code=0)
