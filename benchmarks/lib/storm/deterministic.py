"""A deterministic run whose coordinator is killed again and again. Resumed, it must end with the
weights of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.live_run import LiveRun, until
from benchmarks.lib.storm.judges import Findings
from tianflow.rundir.checkpoints import CheckpointStore

START_S = END_S = 180.0
LEFT_S = 10.0
BARRIER = 20
KILL_WITHIN_S = 4.0
"""A kill comes at most so long after the coordinator answers."""
SHARE = 5
"""The uninterrupted run takes one part of so many of the time."""
CONFIG = """[env]
id = "CartPole-v1"
num_envs = 4
normalisation = {{ observations = true }}
[algorithm]
name = "ppo"
minibatch_size = 32
epochs = 2
[network]
hidden = [16]
[actors]
count = 1
rollout_steps = 16
[balance]
max_staleness = 0
[placement]
affinity = "none"
[evaluation]
episodes = 1
num_envs = 1
[run]
seed = {seed}
deterministic = true
barrier_updates = {barrier}
max_updates = {updates}
"""


class Resumes:
    """One run that is left alone, and one that is killed and resumed until it has as many updates.

    Args:
        seconds: rough length of both together.
        seed: of the runs and of the kills.
        scratch: directory for everything.
        findings: where differences are reported.
        log: called with each step.
    """

    def __init__(
        self,
        *,
        seconds: float,
        seed: int,
        scratch: Path,
        findings: Findings,
        log: Callable[[str], None],
    ) -> None:
        self._seconds, self._seed, self._scratch = seconds, seed, scratch
        self._findings, self._log = findings, log
        self._dice = random.Random(seed)
        self.kills = 0
        self.updates = 0

    def run(self) -> None:
        """Run both, and compare their last checkpoints."""
        began = time.monotonic()
        through, rate = self._left_alone(BARRIER * 10)
        share = self._seconds / SHARE - (time.monotonic() - began)
        if rate * share > 2 * BARRIER * 10:
            updates = round(rate * share / BARRIER) * BARRIER
            through, _ = self._left_alone(updates)
        struck = self._struck(began + self._seconds)
        self.compare(through, struck)

    def compare(
        self, through: Mapping[str, NDArray[Any]], struck: Mapping[str, NDArray[Any]]
    ) -> None:
        """Report every array that is not the same in both."""
        different = [
            name
            for name in sorted({*through, *struck})
            if name not in through or name not in struck or not _same(through[name], struck[name])
        ]
        if different:
            detail = f"after {self.kills} kills and {self.updates} updates: {', '.join(different)}"
            self._findings.report("resume", "not bit for bit", detail)

    def _left_alone(self, updates: int) -> tuple[dict[str, NDArray[Any]], float]:
        """Return the last state of a run of so many updates, and its updates a second."""
        self.updates = updates
        live = self._start(f"through-{updates}", resume=False)
        try:
            code = live.wait(END_S + self._seconds)
            summary = live.summary
        finally:
            live.kill_all()
        if code:
            raise RuntimeError(f"the run that is left alone ended with {code}\n{live.stderr}")
        self._log(f"{updates} updates in {summary['training_s']:.1f} s")
        return _last_state(live), updates / summary["training_s"]

    def _struck(self, deadline: float) -> dict[str, NDArray[Any]]:
        """Return the last state of a run that is killed until ``deadline`` or its last update."""
        life = 0
        while True:
            directory = self._scratch / "struck"
            resume = any((directory / "checkpoints").glob("v*-*"))
            if not resume:  # it was killed before its first checkpoint, so it begins again
                shutil.rmtree(directory, ignore_errors=True)
            live = self._start("struck", resume=resume)
            life += 1
            try:
                if time.monotonic() < deadline and self._killed(live):
                    self.kills += 1
                    left = live.leftovers(LEFT_S)
                    if left:
                        self._findings.report("left", "deterministic run", "; ".join(left))
                    continue
                code = live.wait(END_S + self._seconds)
            finally:
                live.kill_all()
            if code:
                detail = f"exit code {code}, not 0"
                self._findings.report("end", "deterministic run", detail, live.stderr[-4000:])
            self._log(f"{self.kills} kills in {life} lives")
            return _last_state(live)

    def _killed(self, live: LiveRun) -> bool:
        """Kill the coordinator at a random moment. False if the run ended before."""
        until("it answers", lambda: live.contact or not live.alive, within_s=START_S)
        moment = time.monotonic() + self._dice.uniform(0.0, KILL_WITHIN_S)
        while time.monotonic() < moment and live.alive:
            time.sleep(0.01)
        if not live.alive:
            return False
        live.process.kill()
        live.process.wait()
        return True

    def _start(self, name: str, *, resume: bool) -> LiveRun:
        config = self._scratch / f"{name}.toml"
        config.write_text(
            CONFIG.format(seed=self._seed % 2**32, barrier=BARRIER, updates=self.updates),
            encoding="utf-8",
        )
        arguments = ("--resume", name) if resume else (str(config), f"run.name={name}")
        return LiveRun(
            name=name, runs=self._scratch, logs=self._scratch, arguments=arguments, environment={}
        )


def _last_state(live: LiveRun) -> dict[str, NDArray[Any]]:
    newest = CheckpointStore(live.directory / "checkpoints", keep=1).newest()
    return {} if newest is None else newest.read()


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
    )
