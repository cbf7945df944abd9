"""Two ranks on two GPUs, joined by NCCL, train as one learner on one GPU would on the whole batch.
Each rank is a process of its own.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.algorithms import test_off_policy as off_policy
from tests.algorithms import test_on_policy as on_policy
from tests.algorithms.test_ranks import BROKEN, UPDATES, part, same
from tianflow.algorithms.common import ranks as grouped
from tianflow.algorithms.common.ranks import ALONE, Ranks
from tianflow.components.batch_trainer import BatchTrainer
from tianflow.components.stacking import DrawStacker
from tianflow.config.schedules import Elapsed
from tianflow.core.layout import make_draw_layout, views
from tianflow.core.payloads import Trajectory, TrajectoryLayout, Version
from tianflow.interfaces import LearnerBatch, StepResult

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]
Arrays: TypeAlias = Mapping[str, NDArray[Any]]
RANKS = 2
PATIENCE_S = 120.0
"""NCCL and two contexts start within seconds."""
CLOSE = {"fp32": 1e-5, "bf16": 2e-3}
"""Largest difference of parameters after `UPDATES`, by precision. Gradients of bfloat16 are rounded
on each rank before they are added.
"""
STATISTICS = {"fp32": {}, "bf16": {"rel": 3e-2, "abs_": 5e-2}}
"""Largest differences of statistics, likewise. One of 34 ratios may be clipped on one side only."""


class Case(NamedTuple):
    """What is trained, and on which kind of device."""

    name: str
    changes: Mapping[str, Any] = {}
    lstm: int = 0
    network: str = "mlp"
    precision: str = "fp32"
    device: str = "cuda"

    def device_of(self, rank: int) -> torch.device:
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device("cpu")

    def spec(self) -> Any:
        leaf = on_policy.LEAF if self.network == "mlp" else on_policy.IMAGE
        return on_policy.spec(on_policy.DISCRETE, leaf, mask=True)

    def config(self) -> Any:
        found = on_policy.config(
            self.name,
            lstm=self.lstm,
            network=self.network,
            normalise=self.network == "mlp",
            **self.changes,
        )
        learner = found.learner.model_copy(update={"precision": self.precision})
        return found.model_copy(update={"learner": learner})

    def learner(self, rank: int) -> Any:
        device = self.device_of(rank)
        if self.name in off_policy.FACTORIES:
            return off_policy.made(self.name, normalise=True, device=device)[1]
        return on_policy.ALGORITHMS[self.name].make_learner(self.config(), self.spec(), device)

    def batches(self) -> list[Arrays]:
        if self.name in off_policy.FACTORIES:
            found = [off_policy.windows(self.name, seed=seed) for seed in range(UPDATES)]
        else:
            env = self.spec()
            policy, _ = on_policy.pair(self.config(), env)
            found = [on_policy.rollout(policy, env, seed=seed) for seed in range(UPDATES)]
            for arrays in found:  # ranks have different numbers of valid rows
                arrays["valid"][:, -2:] &= torch.rand(arrays["valid"][:, -2:].shape) < 0.3
        return [{name: value.numpy() for name, value in arrays.items()} for arrays in found]


class Trained(NamedTuple):
    """A learner after its updates."""

    parameters: NDArray[np.float32]
    extras: Arrays
    flat: bytes
    results: list[StepResult]
    devices: int
    """GPUs on which the process has memory."""


def train(case: Case, ranks: Ranks, learner: Any, batches: list[Arrays]) -> Trained:
    """An update on this rank's part of each of ``batches``; `BROKEN` is not finite."""
    learner.join(ranks)
    results = []
    for number, arrays in enumerate(batches):
        own = part({name: torch.from_numpy(value) for name, value in arrays.items()}, ranks)
        if number == BROKEN and ranks.rank == ranks.size - 1:
            own["reward"] = torch.full_like(own["reward"], math.nan)
        device = case.device_of(ranks.rank)
        results.append(
            learner.step(LearnerBatch({name: value.to(device) for name, value in own.items()}))
        )
    buffer = learner.model.buffer
    return Trained(
        buffer.parameters.cpu().numpy(),
        {name: value.cpu().numpy() for name, value in buffer.extras.items()},
        learner.flat().tobytes(),
        results,
        sum(torch.cuda.memory_reserved(k) > 0 for k in range(torch.cuda.device_count())),
    )


def joined(case: Case, rank: int, rendezvous: Path) -> Ranks:
    device = case.device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return grouped.join(rendezvous, rank=rank, size=RANKS, device=device)


def train_as_rank(
    rank: int, rendezvous: Path, case: Case, state: Arrays, batches: list[Arrays]
) -> Trained:
    ranks, learner = joined(case, rank, rendezvous), case.learner(rank)
    if rank == 0:
        learner.load_state_dict(state)
    ranks.copy_state(learner)
    return train(case, ranks, learner, batches)


class Pair:
    """Two processes, one a rank. They are replaced after an error."""

    def __init__(self) -> None:
        self._pools: list[ProcessPoolExecutor] = []

    def run(self, work: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call ``work`` with the number of each rank and ``arguments``, at the same time."""
        if not self._pools:
            spawn = multiprocessing.get_context("spawn")
            self._pools = [ProcessPoolExecutor(1, mp_context=spawn) for _ in range(RANKS)]
        running: list[Future[Any]] = [
            pool.submit(work, rank, *arguments) for rank, pool in enumerate(self._pools)
        ]
        try:
            return [each.result(PATIENCE_S) for each in running]
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        for pool in self._pools:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown()
        self._pools = []


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair()
    yield found
    found.end()


CASES = [
    Case("a2c"),
    Case("a2c", {"normalise_advantages": True}),
    Case("impala"),
    Case("impala", {"normalise_advantages": True}, lstm=8),
    Case("ppo", {"epochs": 1, "minibatch_size": 1000}),
    Case("ppo", {"epochs": 1, "minibatch_size": 1000}, lstm=8),
    Case("dqn"),
    Case("impala", network="nature_cnn"),
    Case("impala", precision="bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks_on_two_gpus_equal_one_with_the_whole_batch(
    case: Case, pair: Pair, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    alone = case.learner(0)
    state, batches = alone.state_dict(), case.batches()
    whole = train(case, ALONE, alone, batches)
    assert [number for number, result in enumerate(whole.results) if not result.finite] == [BROKEN]
    assert state["flat"].tobytes() != whole.flat

    found = pair.run(train_as_rank, tmp_path / "ranks", case, state, batches)
    for rank in found:
        difference = float(np.abs(rank.parameters - whole.parameters).max())
        record_property("largest difference of parameters", difference)
        same(rank.results, whole.results, **STATISTICS[case.precision])
        close = CLOSE[case.precision]
        np.testing.assert_allclose(rank.parameters, whole.parameters, rtol=close, atol=close)
        for name, value in whole.extras.items():
            np.testing.assert_allclose(rank.extras[name], value, rtol=1e-5, atol=1e-5)
        assert rank.flat == found[0].flat
        assert (1 if case.device == "cuda" else 0) == rank.devices
    if case.name == "dqn":
        for number, result in enumerate(whole.results):
            if result.finite:
                parts = [rank.results[number].priorities for rank in found]
                np.testing.assert_allclose(
                    np.concatenate(parts), result.priorities, rtol=1e-3, atol=1e-4
                )


class Draw(NamedTuple):
    """A draw in memory that processes share."""

    layout: TrajectoryLayout
    file: Path

    def views(self) -> dict[str, NDArray[Any]]:
        return views(self.layout, np.memmap(self.file, np.uint8, "r+"))


def train_on_draw(rank: int, rendezvous: Path, case: Case, state: Arrays, draw: Draw) -> None:
    """One update of this rank on its items of ``draw``."""
    ranks, learner = joined(case, rank, rendezvous), case.learner(rank)
    if rank == 0:
        learner.load_state_dict(state)
    ranks.copy_state(learner)
    learner.join(ranks)
    update(case, ranks, learner, draw)


def update(case: Case, ranks: Ranks, learner: Any, draw: Draw) -> None:
    layout, arrays = draw.layout, draw.views()
    trainer = BatchTrainer(
        algorithm=learner,
        make_stacker=lambda _: DrawStacker(
            layout=layout,
            device=case.device_of(ranks.rank),
            items=ranks.share(layout.num_envs),
        ),
        view=lambda _: arrays,
        ranks=ranks,
        draws=True,
    )
    settings = off_policy.SETTINGS[case.name]
    config = on_policy.config("impala").model_copy(update={"algorithm": settings})
    trajectory = Trajectory(0, 0, layout.steps, layout.num_envs, Version(1, 0))
    trainer.train(config, (trajectory,), Elapsed(0, 0, 0.0), lambda: False)


def test_each_rank_trains_on_its_items_of_a_draw_and_returns_their_priorities(
    pair: Pair, tmp_path: Path
) -> None:
    case, items = Case("dqn"), 12
    arrays = off_policy.windows("dqn", n=items)
    spec = on_policy.spec(off_policy.CHOICE, off_policy.VECTOR, off_policy.NUMBER)
    length = off_policy.SETTINGS["dqn"].window[0]
    layout = make_draw_layout(spec, length=length, items=items, state_spec={})
    draws = [Draw(layout, tmp_path / name) for name in ("whole", "shared")]
    for draw in draws:
        draw.file.write_bytes(bytes(layout.nbytes))
        for name, array in draw.views().items():
            if name in arrays:
                array[...] = arrays[name].numpy().reshape(array.shape)

    alone = case.learner(0)
    state = alone.state_dict()
    update(case, ALONE, alone, draws[0])
    pair.run(train_on_draw, tmp_path / "ranks", case, state, draws[1])
    expected, found = (draw.views()["priority"] for draw in draws)
    assert items == len(set(expected.tolist()))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
