"""Suite: a learner on GPUs, from slots to gradient, over the step on a resident batch; two ranks
over one.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib import child, machine
from benchmarks.lib.harness import (
    Benchmark,
    BenchmarkError,
    Plan,
    Ratio,
    RoundValues,
    Together,
    Values,
    quotient,
    require_atari,
)
from benchmarks.lib.machine import ROOT
from benchmarks.suites.actors import PONG

CONFIG = ROOT / "configs" / "pong_impala.toml"
TRAJECTORIES, NUM_ENVS, STEPS = 16, 16, 16
"""4,096 samples for each rank."""
NETWORKS = ("nature_cnn", "impala_resnet")
PRECISIONS = ("fp32", "tf32", "bf16")
TIMEOUT_S = 120.0


class Case(NamedTuple):
    """One learner."""

    network: str
    precision: str
    ranks: int

    @property
    def name(self) -> str:
        """Name of its side."""
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.network}, {self.precision}{ranks}"


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: there is no GPU, or ale-py is not installed.
    """
    require_atari()
    count = 0 if plan.quick else len(machine.gpus())
    if not plan.quick and not count:
        raise BenchmarkError("this machine has no NVIDIA GPU")
    device, seconds = ("cpu", 0.1) if plan.quick else ("cuda", 1.0)
    sizes = (1, 2) if plan.quick or count > 1 else (1,)
    steps, envs = (4, 2) if plan.quick else (STEPS, NUM_ENVS)
    trajectories = 2 if plan.quick else TRAJECTORIES

    groups = [
        tuple(Case(network, precision, size) for precision in PRECISIONS for size in sizes)
        for network in NETWORKS
    ]

    def arguments(case: Case, rank: int, folder: Path) -> tuple[object, ...]:
        return (
            CONFIG,
            *("--rank", rank, "--ranks", case.ranks, "--device", device),
            *("--rendezvous", folder / f"{case.precision}-{case.ranks}"),
            *PONG,
            f"network.name={case.network}",
            f"learner.precision={case.precision}",
            f"algorithm.batch_trajectories={trajectories * case.ranks}",
            f"actors.rollout_steps={steps}",
            f"env.num_envs={envs}",
        )

    def measure(cases: tuple[Case, ...]) -> Mapping[str, Values]:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=plan.scratch)))
            partners = {
                case: [
                    stack.enter_context(
                        child.Partner(
                            "benchmarks.workers.gpu_learner", *arguments(case, rank, folder)
                        )
                    )
                    for rank in range(case.ranks)
                ]
                for case in cases
            }
            found: dict[str, dict[str, float | None]] = {case.name: {} for case in cases}
            for ranks in partners.values():  # no process starts beside a measurement
                turn(ranks, "resident", 0.0)
            for stage in ("resident", "slots"):
                for case, ranks in partners.items():
                    first = turn(ranks, stage, seconds)
                    found[case.name] |= {
                        stage: first["samples_per_s"],
                        f"{stage}_cpu": first["cpu_s_per_million"],
                    }
            return found

    return Benchmark(
        name="learner_gpu",
        title="samples/s of a learner on GPUs",
        sides=tuple(
            Together(tuple(case.name for case in cases), lambda _, cases=cases: measure(cases))  # type: ignore[misc]
            for cases in groups
        ),
        ratios=(
            *(
                Ratio(
                    f"{case.name}: from slots over resident",
                    _over_resident(case),
                    0.95,
                    sides=(case.name,),
                )
                for cases in groups
                for case in cases
            ),
            *(
                Ratio(
                    f"{case.name} over one, from slots",
                    _over_one(case),
                    1.8 if case.network == "impala_resnet" else None,
                    sides=(case.name, case._replace(ranks=1).name),
                )
                for cases in groups
                for case in cases
                if case.ranks > 1
            ),
        ),
        units={
            "resident": "samples/s, the step alone",
            "slots": "samples/s, copy out of slots, step, weights laid out flat",
            "resident_cpu": "s of CPU time for a million samples",
            "slots_cpu": "s of CPU time for a million samples",
        },
        settings={
            "cards": machine.cards(),
            "batch": f"IMPALA, {trajectories} trajectories of {steps} x {envs} samples of "
            "84 x 84 x 4 for each rank",
            "turns": f"{seconds:g} s each; the processes of a network take turns",
            "threads": "1 a process, and those of CUDA",
        },
        notes=("Both exclude messages and the publication of weights.",),
    )


def turn(ranks: Sequence[child.Partner], stage: str, seconds: float) -> dict[str, float]:
    """Let all ranks of a learner make updates. Return what rank 0 has measured."""
    for partner in ranks:
        partner.send(f"{stage} {seconds}")
    first, *_ = [partner.receive(timeout_s=TIMEOUT_S) for partner in ranks]
    return first


def _over_resident(case: Case) -> Callable[[RoundValues], float | None]:
    return lambda values: quotient(values[case.name]["slots"], values[case.name]["resident"])


def _over_one(case: Case) -> Callable[[RoundValues], float | None]:
    one = case._replace(ranks=1)
    return lambda values: quotient(values[case.name]["slots"], values[one.name]["slots"])
