"""Rows of a comparison with peers: each run is a process with an interpreter of its own, and all
rows have the same values.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import child
from benchmarks.lib.harness import BenchmarkError, Plan, Side, Values, quotient
from benchmarks.peers import install
from benchmarks.workers import training

GRACE_S = 60.0
"""Time that a peer gets beyond its training, to start and to end. After it the peer counts as
hung.
"""
POLL_S = 1.0
"""Seconds between memory samples. The largest process trees then cost hundredths of a core."""
TO_TARGET = ("time_to_target", "start_to_target", "steps_to_target")
"""Values of runs that have a target."""
OF_SERVERS = ("batch_requests", "wait_p50", "wait_p99")
"""Values of runs with an inference server."""
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
    "hung": "runs that exceeded their time",
    "failed": "runs that ended with an error",
    NOT_INSTALLED: "make bench-peers installs it",
}


@dataclass(frozen=True, slots=True)
class Rival:
    """One row of a peer.

    Attributes:
        name: name of the row.
        peer: name of its environment in `install.PEERS`.
        module: its script.
        options: options of the script, beside those of the benchmark.
        threads: threads of numerical libraries in each process. None: the peer chooses.
        settings: description of its settings for the reader.
        start_s: time that its processes need to start beyond `GRACE_S`.
    """

    name: str
    peer: str
    module: str
    settings: str
    options: tuple[str, ...] = ()
    threads: int | None = 1
    start_s: float = 0.0


def rival_side(
    rival: Rival, arguments: tuple[object, ...], seconds: float, seeds: tuple[int, ...]
) -> Side:
    """Make the side that measures ``rival``. A peer that is not installed gives that value in each
    round and costs no time.
    """
    if not install.versions(install.PEERS[rival.peer]):
        return Side(rival.name, lambda _: {NOT_INSTALLED: None})
    return Side(
        rival.name, lambda number: attempt(rival, ("--seed", seeds[number], *arguments), seconds)
    )


def attempt(rival: Rival, arguments: tuple[object, ...], seconds: float) -> Values:
    """Run ``seconds`` of training at most. A run that hangs or fails gives a value that says so,
    and the other rows go on.
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
            timeout_s=seconds + GRACE_S + rival.start_s,
            watch_memory=True,
            memory_poll_s=POLL_S,
            python=install.interpreter(rival.peer),
            threads=rival.threads,
        )
    except child.ChildTimeoutError:
        return nothing | {"hung": 1.0}
    except BenchmarkError as error:
        print(error, file=sys.stderr, flush=True)
        return nothing | {"failed": 1.0}
    return values_of(done)


def values_of(done: child.Finished) -> Values:
    """Return the values of a peer's answer in the form of `benchmarks.peers.common`, without the
    values that the peer does not report.
    """
    answer = done.answer
    values: Values = {
        "time_to_target": answer["time_to_target_s"],
        "start_to_target": answer["start_to_target_s"],
        "steps_to_target": answer["steps_to_target"],
        "env_steps_per_s": answer["env_steps_per_s"],
        "return": answer["mean_return"],
    }
    if answer["lag_mean"] is not None:
        values |= {"lag_mean": answer["lag_mean"], "lag_max": answer["lag_max"]}
    return values | cost(done) | (window_values(answer["window"]) if "window" in answer else {})


def window_values(window: Mapping[str, Any]) -> Values:
    """Return the values of a window that a peer with an inference server measured itself."""
    counts = dict(zip((*window["edges"], math.inf), window["counts"], strict=True))
    return {
        "cores": window["cpu_s"] / window["seconds"],
        "batch_requests": quotient(sum(counts.values()), window["batches"]),
        "wait_p50": training.quantile(counts, 0.5),
        "wait_p99": training.quantile(counts, 0.99),
    }


def cost(done: child.Finished) -> Values:
    """Return the cost of a run."""
    spent: Values = {"whole_process": done.wall_s, "cores": done.cpu_s / done.wall_s}
    return spent if done.peak_mib is None else spent | {"peak_pss": done.peak_mib}


def ours_to_target(config: str, overrides: tuple[str, ...], plan: Plan, seconds: float) -> Values:
    """Run ``tianflow train`` as a user calls it, until the target or for ``seconds``.

    It evaluates 100 episodes and shuts down before it prints the result. Time since the start and
    steps are therefore upper bounds.
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
            memory_poll_s=POLL_S,
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
    """Measure an endless run over ``window``."""
    return _sustained_values(_sustained(config, overrides, plan, window))


def ours_served(
    config: Path, overrides: tuple[str, ...], plan: Plan, window: training.Window
) -> Values:
    """Measure as `ours_sustained` does, with the values of the inference server, and with the cores
    that were used in the window, not in the whole process.
    """
    done = _sustained(config, overrides, plan, window)
    used = [value for name, value in done.answer.items() if name.startswith("cores_")]
    return {
        **_sustained_values(done),
        "cores": sum(used),
        **{name: done.answer[name] for name in OF_SERVERS if name in done.answer},
    }


def _sustained(
    config: Path, overrides: tuple[str, ...], plan: Plan, window: training.Window
) -> child.Finished:
    with tempfile.TemporaryDirectory(dir=plan.scratch) as runs:
        arguments = (config, window.warm_s, window.seconds, runs, *overrides)
        timeout_s = window.warm_s + window.seconds + GRACE_S
        return child.run(
            "benchmarks.workers.training",
            *arguments,
            timeout_s=timeout_s,
            watch_memory=True,
            memory_poll_s=POLL_S,
        )


def _sustained_values(done: child.Finished) -> Values:
    answer: Mapping[str, Any] = done.answer
    return {
        "env_steps_per_s": answer["trained_per_s"],
        "return": answer["return"],
        "lag_mean": answer["staleness_mean"],
        "lag_max": answer["staleness_max"],
        **cost(done),
    }


def versions(rivals: tuple[Rival, ...]) -> dict[str, str]:
    """Return a line of settings for each rival, with its installed versions."""
    found = {}
    for rival in rivals:
        installed = install.versions(install.PEERS[rival.peer])
        packages = (
            ", ".join(f"{name} {version}" for name, version in installed.items()) or "not installed"
        )
        found[rival.name] = f"{rival.settings} ({packages})"
    return found
