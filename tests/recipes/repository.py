"""A copy of the packages in which a recipe edits files, and a run of that copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SERVE = '''
"""Train with a control server until the actor has reported, and print answers to GET requests."""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import tianflow
from tianflow.rundir.control_file import ControlFile

TABLES = {
    "env": {"id": "CartPole-v1", "num_envs": 4},
    "algorithm": {"name": "ppo"},
    "actors": {"count": 1, "rollout_steps": 16},
    "placement": {"launcher": "inline"},
    "run": {"name": "served", "max_seconds": 60.0},
    "http": {"port": 0},
    "metrics": {"interval_s": 0.05},
}


def get(contact, path):
    headers = {"Authorization": f"Bearer {contact.token}"}
    try:
        request = urllib.request.Request(contact.address + path, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def has_reported(statistics):
    return any(
        component.counters.get("trajectories", 0) >= 3 for component in statistics.components
    )


def answers(paths):
    contact = ControlFile.read(Path("runs/served"))
    return {path: get(contact, path) for path in paths}


async def main(paths):
    async with tianflow.open_run(TABLES, runs_dir="runs", http=True) as run:
        while not has_reported(run.control.statistics()):
            await asyncio.sleep(0.01)
        return await asyncio.to_thread(answers, paths)


print(json.dumps(asyncio.run(main(sys.argv[1:]))))
'''


class Repository:
    """Copies of tianflow and its controllers in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # compiled modules stay valid in the copy, because it preserves the times of the sources
        shutil.copytree(ROOT / "tianflow", folder / "tianflow")
        controllers = ROOT / "controllers" / "tianflow_controllers"
        shutil.copytree(controllers, folder / "tianflow_controllers")
        shutil.copytree(ROOT / "configs", folder / "configs")

    def edit(self, file: str, before: str, after: str) -> None:
        """Insert ``after`` behind the only occurrence of ``before``."""
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        assert 1 == text.count(before), f"{file} has {text.count(before)} times: {before}"
        path.write_text(text.replace(before, before + after), encoding="utf-8")

    def serve(self, *paths: str) -> dict[str, tuple[int, str]]:
        """Train with the copy, and return status and text of the answer to each path."""
        (self.folder / "serve.py").write_text(SERVE, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "serve.py", *paths],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        return {path: (status, text) for path, (status, text) in found.items()}
