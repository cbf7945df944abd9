"""Worker: one rank of a learner on a GPU, which trains on slots, and on a resident batch.

Each line of its input is a stage and seconds; it answers with a line of JSON. All ranks make the
same updates: rank 0 decides before each one whether it is the last of its turn, as a learner sends
an order for each update.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.lib import child

if TYPE_CHECKING:
    from tianflow.algorithms.common.ranks import Ranks
    from tianflow.channels.arena import Arena
    from tianflow.components.staging import StagedBatch
    from tianflow.config.model import Config
    from tianflow.interfaces import AlgorithmFactory

WARM_S = 0.5
REAL = 4
"""Trajectories that the shipped rollout makes. The other slots are copies of them."""


def turn(update: Callable[[], int], ranks: Ranks, seconds: float) -> dict[str, float]:
    """Make updates for ``seconds`` on all ranks. Return samples of all ranks per second, and the
    seconds of CPU time of this process for a million samples of its own.
    """
    _wait_for_device()
    began, cpu, samples = time.perf_counter(), cpu_seconds(), 0
    while _goes_on(ranks, time.perf_counter() - began < seconds):
        samples += update()
    _wait_for_device()
    wall, used = time.perf_counter() - began, cpu_seconds() - cpu
    return {
        "samples_per_s": samples / wall,
        "cpu_s_per_million": 1e6 * used * ranks.size / max(1, samples),
        "cores": used / wall,
    }


def cpu_seconds() -> float:
    """Return the CPU time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _goes_on(ranks: Ranks, wanted: bool) -> bool:
    if ranks.size == 1:
        return wanted
    if ranks.rank:
        return bool(ranks.receive())
    ranks.send(b"1" if wanted else b"")
    return wanted


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def stages(config: Config, ranks: Ranks, device: Any) -> dict[str, Callable[[], int]]:
    """Return the updates of this rank, which return their samples. The learning rate is 0, so that
    trajectories stay on-policy.
    """
    from tianflow import envs, plugins
    from tianflow.components.batch_trainer import BatchTrainer
    from tianflow.components.stacking import BatchStacker
    from tianflow.components.staging import make_stager
    from tianflow.config.schedules import Elapsed
    from tianflow.core.payloads import Trajectory, Version
    from tianflow.planning.layouts import trajectory_layout

    spec, count = envs.probe(config), config.algorithm.batch_trajectories
    layout = trajectory_layout(config, spec)
    factory = cast(
        "AlgorithmFactory",
        plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name"),
    )
    arena, lengths = filled_slots(config, factory, 2 * count)
    algorithm: Any = factory.make_learner(config, spec, device)
    if ranks.size > 1:
        ranks.copy_state(algorithm)
        algorithm.join(ranks)
    trajectories = [
        Trajectory(slot, slot, length, length * layout.num_envs, Version(1, 0))
        for slot, length in enumerate(lengths)
    ]
    batches = [tuple(trajectories[:count]), tuple(trajectories[count:])]
    trainer = BatchTrainer(
        algorithm=algorithm,
        make_stacker=lambda n: BatchStacker(layout=layout, trajectories=n, device=device),
        view=lambda trajectory: arena.views(trajectory.slot),
        ranks=ranks,
        stager=make_stager(arena, device),
    )
    staging = ThreadPoolExecutor(1)
    staged: Future[StagedBatch] | None = None
    quiet = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"learning_rate": 0.0})}
    )
    elapsed = Elapsed(0, 0, 0.0)

    def from_slots() -> int:
        """As a learner: it stages the next batch during the update."""
        nonlocal staged
        batches.reverse()
        ready = None if staged is None else staged.result()
        if trainer.stages_ahead:
            staged = staging.submit(trainer.stage, batches[1])
        trained = trainer.train(quiet, batches[0], elapsed, lambda: False, ready)
        trained.staged.release()
        algorithm.flat()
        return samples_of(trained.result)

    resident = trainer.train(quiet, batches[0], elapsed, lambda: False).arrays
    return {
        "resident": lambda: samples_of(algorithm.step(resident)),
        "slots": from_slots,
    }


def samples_of(result: Any) -> int:
    """Return the samples of an update.

    Raises:
        RuntimeError: it was not finite and was undone, which is different work.
    """
    if not result.finite:
        raise RuntimeError("the update was not finite and was undone, which is different work")
    return int(result.samples)


def filled_slots(config: Config, factory: AlgorithmFactory, slots: int) -> tuple[Arena, list[int]]:
    """Return slots with trajectories, and their lengths."""
    from tianflow import envs
    from tianflow.channels.memory import heap_arena
    from tianflow.components.rollout import Rollout
    from tianflow.core.payloads import Grant, Version
    from tianflow.planning.layouts import trajectory_layout

    spec, version = envs.probe(config), Version(1, 0)
    arena = heap_arena(trajectory_layout(config, spec), slots)
    arena.slots = slots
    rollout = Rollout(
        config=config,
        spec=spec,
        policy=factory.make_policy(config, spec),
        load_weights=lambda: version,
        component="actor-0",
        actor_index=0,
    )
    lengths = []
    for slot in range(min(slots, REAL)):
        grant = Grant(slot, slot, version)
        lengths.append(rollout.run(arena.lease(grant), grant, config.actors.rollout_steps).length)
    rollout.close()
    for slot in range(REAL, slots):
        lengths.append(lengths[slot % REAL])
        for name, array in arena.views(slot).items():
            array[...] = arena.views(slot % REAL)[name]
    return arena, lengths


def main() -> None:
    """Arguments: ``CONFIG [--rank R --ranks N --rendezvous FILE] [--device D]
    [section.key=value ...]``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rendezvous", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    import torch

    from tianflow.algorithms.common import ranks as grouped
    from tianflow.config.loading import load_config
    from tianflow.hosts.factory import opened

    torch.set_num_threads(1)
    device = torch.device(given.device)
    if device.type == "cuda":
        device = opened(torch.device("cuda", given.rank))
    config = load_config(given.config, given.overrides)
    ranks = grouped.ALONE
    if given.ranks > 1:
        ranks = grouped.join(given.rendezvous, rank=given.rank, size=given.ranks, device=device)
    found = stages(config, ranks, device)
    for update in found.values():
        turn(update, ranks, WARM_S)
    for line in sys.stdin:
        stage, seconds = line.split()
        child.report(turn(found[stage], ranks, float(seconds)))


if __name__ == "__main__":
    main()
