"""Suite: updates alone of SAC, TD3 and DQN, beside Stable-Baselines3, SBX and plain PyTorch loops.

All processes of an algorithm are up at once, and take turns in short windows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib import child, machine
from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Together,
    Values,
    quotient,
)
from benchmarks.peers import install

ALGORITHMS = ("sac", "td3", "dqn")
START_S = 240.0
"""Longest start of one process, which includes compilation."""
TURNS = 4
OURS, SB3, SBX = "tianflow", "Stable-Baselines3", "SBX"
EAGER, COMPILED = "PyTorch", "PyTorch compiled"


class Case(NamedTuple):
    """One process that makes updates."""

    algorithm: str
    device: str
    who: str
    threads: int

    @property
    def name(self) -> str:
        """Name of its side."""
        threads = ", 1 thread" if self.device == "cpu" and self.threads == 1 else ""
        return f"{self.algorithm} on {self.device}, {self.who}{threads}"


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``. Peers that are not installed have no sides."""
    seconds, hidden = (0.05, "8,8") if plan.quick else (0.5, "256,256")
    peers = {SB3: "sb3", SBX: "sbx"}
    there = {who: name for who, name in peers.items() if install.is_current(install.PEERS[name])}
    compiles = shutil.which(os.environ.get("CXX", "g++")) is not None and not plan.quick
    devices = ("cpu", "cuda") if machine.gpus() and not plan.quick else ("cpu",)

    def cases(algorithm: str, device: str) -> tuple[Case, ...]:
        threads = min(2, len(os.sched_getaffinity(0))) if device == "cpu" else 1
        found = [Case(algorithm, device, OURS, threads), Case(algorithm, device, EAGER, threads)]
        if compiles:
            found.append(Case(algorithm, device, COMPILED, threads))
        if SB3 in there:
            found.append(Case(algorithm, device, SB3, threads))
        if SBX in there and device == "cpu":
            found.append(Case(algorithm, device, SBX, threads))
        if threads > 1:
            alone = [case for case in found if case.who in (OURS, SB3)]
            found += [case._replace(threads=1) for case in alone]
        return tuple(found)

    groups = [cases(algorithm, device) for device in devices for algorithm in ALGORITHMS]

    def measure(group: tuple[Case, ...]) -> Mapping[str, Values]:
        with contextlib.ExitStack() as stack:
            partners = {
                case: stack.enter_context(partner(case, hidden, plan.scratch)) for case in group
            }
            for each in partners.values():
                each.receive(timeout_s=START_S)
            taken: dict[str, list[dict[str, float]]] = {case.name: [] for case in group}
            for _ in range(1 if plan.quick else TURNS):
                for case, each in partners.items():
                    each.send(seconds)
                    taken[case.name].append(each.receive(timeout_s=START_S))
            return {name: means(turns) for name, turns in taken.items()}

    return Benchmark(
        name="off_policy",
        title="updates/s of replay algorithms, 256 transitions, two layers of 256",
        sides=tuple(
            Together(tuple(case.name for case in group), lambda _, group=group: measure(group))  # type: ignore[misc]
            for group in groups
        ),
        ratios=tuple(
            Ratio(
                f"{case.name} over {other.who}",
                _over(case, other),
                aim(case, other),
                sides=(case.name, other.name),
            )
            for group in groups
            for case in group
            for other in group
            if case.who == OURS and other.who != OURS and case.threads == other.threads
        ),
        units={"updates_per_s": "updates/s", "cpu_ms": "ms of CPU time an update"},
        settings={
            "cards": machine.cards(),
            "turns": f"{TURNS} of {seconds:g} s for each process in a round",
            "threads": "of PyTorch, or learner.threads; SBX chooses its own",
            OURS: "copy of a draw out of its slot, update, weights laid out flat",
            SB3: "train(gradient_steps=20) on a filled replay buffer",
            SBX: "the same in JAX",
            EAGER: "benchmarks/lib/plain_updates.py",
            COMPILED: "the same, with losses compiled by torch.compile",
        },
        notes=[
            f"Drawing is part of an update of {SB3}, {SBX} and {EAGER}, and not of {OURS}.",
            *(
                f"{who} is not installed: python -m benchmarks.peers.install {peers[who]}"
                for who in peers
                if who not in there
            ),
            *(
                ()
                if compiles
                else ("torch.compile was not measured. It needs a C++ compiler, and much time.",)
            ),
        ],
    )


def partner(case: Case, hidden: str, scratch: Path) -> child.Partner:
    """Return the process of ``case``. What the first round compiles stays in ``scratch``."""
    arguments = (case.algorithm, case.device, case.threads, hidden)
    if case.who in (SB3, SBX):
        name = "sb3" if case.who == SB3 else "sbx"
        # JAX counts the cores of the machine if nothing else is said
        return child.Partner(
            "benchmarks.peers.updates",
            name,
            *arguments,
            python=install.interpreter(name),
            threads=case.threads if case.who == SB3 else None,
        )
    who = {OURS: "tianflow", EAGER: "eager", COMPILED: "compiled"}[case.who]
    cache = ("--cache", scratch / "compiled")
    return child.Partner(
        "benchmarks.workers.updates", who, *arguments, *cache, threads=case.threads
    )


def means(turns: list[dict[str, float]]) -> Values:
    """Return the mean rate of turns of equal length, and the mean CPU time of an update."""
    total = sum(turn["updates_per_s"] for turn in turns)
    used = sum(turn["updates_per_s"] * turn["cpu_ms"] for turn in turns)
    return {"updates_per_s": total / len(turns), "cpu_ms": used / total}


def aim(case: Case, other: Case) -> float | None:
    """Return the ratio that is aimed at: with as many cores as the peer has."""
    if case.device == "cpu" and case.threads == 1:
        return None
    return {SB3: 3.0, SBX: 1.0}.get(other.who)


def _over(case: Case, other: Case) -> Callable[[RoundValues], float | None]:
    return lambda values: quotient(
        values[case.name]["updates_per_s"], values[other.name]["updates_per_s"]
    )
