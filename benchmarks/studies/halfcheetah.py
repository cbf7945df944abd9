"""Study of SAC on HalfCheetah: ``python -m benchmarks.studies.halfcheetah`` compares the return
with Stable-Baselines3's, after equal steps with equal settings.

Both run at once, each on a core of its own, because one run takes half an hour. Only the return
counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.results import RESULTS

NAMES = ("tianflow sac", "Stable-Baselines3 SAC")


def tianflow(core: int, seed: int, steps: int) -> dict[str, Any]:
    """Run the shipped config, with learner and actor in one process."""
    with tempfile.TemporaryDirectory() as runs:
        settings = (
            f"run.seed={seed}",
            f"run.max_env_steps={steps}",
            "placement.launcher=inline",
            "placement.affinity=none",
        )
        options = ("--plain", "--json", "--no-http", "--runs-dir", runs)
        answer = _run(core, "tianflow", "train", "halfcheetah_sac", *options, *settings)
    return {
        "evaluation_return": answer["evaluation"]["mean_return"],
        "training_s": answer["training_s"],
        "env_steps": answer["env_steps"],
        "updates": answer["updates"],
    }


def stable_baselines3(core: int, seed: int, steps: int) -> dict[str, Any]:
    """Run the peer."""
    return _run(core, "benchmarks.peers.sb3_halfcheetah", str(seed), str(steps))


def _run(core: int, module: str, *arguments: str) -> dict[str, Any]:
    os.sched_setaffinity(0, {core})  # of this thread and its children
    environment = machine.clean_environment(os.environ)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=machine.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> int:
    """Run both for each seed and write the results. Return 1 if tianflow's median is below 0.8 of
    the peer's.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of each run")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "halfcheetah.json", help="file of the results"
    )
    given = parser.parse_args()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    runs: list[dict[str, Any]] = []
    for seed in range(1, given.seeds + 1):
        with ThreadPoolExecutor(2) as pool:
            ours = pool.submit(tianflow, first, seed, given.steps)
            theirs = pool.submit(stable_baselines3, second, seed, given.steps)
            runs.append({"seed": seed, NAMES[0]: ours.result(), NAMES[1]: theirs.result()})
        print(json.dumps(runs[-1]), flush=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(
            json.dumps(
                {"machine": machine.describe(), "steps": given.steps, "runs": runs}, indent=1
            )
            + "\n",
            encoding="utf-8",
        )
    ours_best, theirs_best = (
        sorted(run[name]["evaluation_return"] for run in runs)[len(runs) // 2] for name in NAMES
    )
    print(
        f"{NAMES[0]} {ours_best:,.0f}, {NAMES[1]} {theirs_best:,.0f}: {ours_best / theirs_best:.2f}"
    )
    return int(ours_best < 0.8 * theirs_best)


if __name__ == "__main__":
    sys.exit(main())
