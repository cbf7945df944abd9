"""tianflow beside a peer: each run a process of its own, with its own interpreter, told in the same
values.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import child
from benchmarks.lib.harness import BenchmarkError, Plan, Side, Values
from benchmarks.peers import install
from benchmarks.workers import training

GRACE_S = 60.0
"""What a peer may need beyond its training, to start and to end, before it counts as hanging."""
LOOK_S = 1.0
"""Seconds between looks at memory: the largest trees of processes take hundredths of a core so."""
TO_TARGET = ("time_to_target", "start_to_target", "steps_to_target")
"""Of runs that have a target."""
NOT_INSTALLED = "not_installed"
UNITS = {
    "time_to_target": "s of training",
    "start_to_target": "s since the process started",
    "steps_to_target": "env steps",
    "env_steps_per_s": "env steps/s",
    "return": "mean of the last 100 training episodes",
    "evaluated": "mean of 100 evaluation episodes, after training",
    "lag_mean": "policy lag",
    "lag_max": "policy lag",
    "whole_process": "s",
    "cores": "cores used",
    "peak_pss": "MiB, process tree",
    "hung": "runs ended after their time",
    "failed": "runs that ended with an error",
    NOT_INSTALLED: "make bench-peers installs it",
}


@dataclass(frozen=True, slots=True)
class Rival:
    """One row that is not tianflow's.

    Attributes:
        name: of the row.
        peer: its environment, a name in `install.PEERS`.
        module: its script.
        options: for the script, beside what the benchmark says.
        threads: of numerical libraries in each process; None leaves it to the peer.
        settings: what a reader needs to know.
    """

    name: str
    peer: str
    module: str
    settings: str
    options: tuple[str, ...] = ()
    threads: int | None = 1


def rival_side(
    rival: Rival, arguments: tuple[object, ...], seconds: float, seeds: tuple[int, ...]
) -> Side:
    """Measures ``rival``; one that is not installed says so in each round, and costs no time."""
    if not install.versions(install.PEERS[rival.peer]):
        return Side(rival.name, lambda _: {NOT_INSTALLED: None})
    return Side(
        rival.name, lambda number: attempt(rival, ("--seed", seeds[number], *arguments), seconds)
    )


def attempt(rival: Rival, arguments: tuple[object, ...], seconds: float) -> Values:
    """One run of ``seconds`` of training at most; what hangs or fails is told as that, for the
    other rows' sake.
    """
    values = _attempt(rival, arguments, seconds)
    return (
        values
        if "--target" in arguments
        else {name: value for name, value in values.items() if name not in TO_TARGET}
    )


def _attempt(rival: Rival, arguments: tuple[object, ...], seconds: float) -> Values:
    nothing: Values = dict.fromkeys((*TO_TARGET, "env_steps_per_s"))
    given = (*arguments, "--seconds", seconds, *rival.options)
    try:
        done = child.run(
            rival.module,
            *given,
            timeout_s=seconds + GRACE_S,
            watch_memory=True,
            memory_look_s=LOOK_S,
            python=install.interpreter(rival.peer),
            threads=rival.threads,
        )
    except child.TookLongerError:
        return nothing | {"hung": 1.0}
    except BenchmarkError as error:
        print(error, file=sys.stderr, flush=True)
        return nothing | {"failed": 1.0}
    return told(done)


def told(done: child.Finished) -> Values:
    """The values of a peer's answer, as `benchmarks.peers.common` has it; without what the peer
    does not tell.
    """
    said = done.answer
    values: Values = {
        "time_to_target": said["time_to_target_s"],
        "start_to_target": said["start_to_target_s"],
        "steps_to_target": said["steps_to_target"],
        "env_steps_per_s": said["env_steps_per_s"],
        "return": said["mean_return"],
    }
    if said["lag_mean"] is not None:
        values |= {"lag_mean": said["lag_mean"], "lag_max": said["lag_max"]}
    return values | cost(done)


def cost(done: child.Finished) -> Values:
    """What a run took."""
    spent: Values = {"whole_process": done.wall_s, "cores": done.cpu_s / done.wall_s}
    return spent if done.peak_mib is None else spent | {"peak_pss": done.peak_mib}


def ours_to_target(config: str, overrides: tuple[str, ...], plan: Plan, seconds: float) -> Values:
    """``tianflow train`` as a user calls it, until the target or for ``seconds``.

    It evaluates 100 episodes and ends before it says how it went, so time since the start and steps
    are upper bounds.
    """
    with tempfile.TemporaryDirectory(dir=plan.scratch) as runs:
        arguments = (
            "train",
            config,
            *overrides,
            f"run.max_seconds={seconds}",
            "evaluation.episodes=100",
        )
        options = ("--plain", "--json", "--runs-dir", runs)
        done = child.run(
            "tianflow",
            *arguments,
            *options,
            timeout_s=seconds + GRACE_S,
            watch_memory=True,
            memory_look_s=LOOK_S,
        )
    summary = done.answer
    reached = summary["time_to_target_s"]
    return {
        "time_to_target": reached,
        "start_to_target": None if reached is None else done.wall_s,
        "steps_to_target": None if reached is None else summary["env_steps"],
        "env_steps_per_s": summary["steps_per_s"],
        "return": summary["mean_return"],
        "evaluated": summary["evaluation"].get("mean_return"),
        "lag_mean": summary["staleness"]["mean"],
        "lag_max": summary["staleness"]["max"],
        **cost(done),
    }


def ours_sustained(
    config: Path, overrides: tuple[str, ...], plan: Plan, window: training.Window
) -> Values:
    """A run without end, looked at over ``window``."""
    with tempfile.TemporaryDirectory(dir=plan.scratch) as runs:
        arguments = (config, window.warm_s, window.seconds, runs, *overrides)
        timeout_s = window.warm_s + window.seconds + GRACE_S
        done = child.run(
            "benchmarks.workers.training",
            *arguments,
            timeout_s=timeout_s,
            watch_memory=True,
            memory_look_s=LOOK_S,
        )
    said: Mapping[str, Any] = done.answer
    return {
        "env_steps_per_s": said["trained_per_s"],
        "return": said["return"],
        "lag_mean": said["staleness_mean"],
        "lag_max": said["staleness_max"],
        **cost(done),
    }


def versions(rivals: tuple[Rival, ...]) -> dict[str, str]:
    """A line of settings for each rival: what it runs with, and which versions are installed, if
    any.
    """
    found = {}
    for rival in rivals:
        there = install.versions(install.PEERS[rival.peer])
        packages = (
            ", ".join(f"{name} {version}" for name, version in there.items()) or "not installed"
        )
        found[rival.name] = f"{rival.settings} ({packages})"
    return found
