"""Ranks of a learner: orders, and each rank's part of a batch out of the slots."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.algorithms.test_ranks import together
from tests.components.test_learner import BASE, SPEC
from tianflow.algorithms.common.ranks import ALONE, Ranks
from tianflow.channels.latest import LatestCell
from tianflow.components.batch_trainer import BatchTrainer
from tianflow.components.learner_rank import LearnerRank, OrderSender, receive_order
from tianflow.components.stacking import BatchStacker, DrawStacker
from tianflow.components.staging import StagedBatch
from tianflow.config.schedules import Elapsed
from tianflow.core.layout import make_draw_layout, make_layout, views
from tianflow.core.payloads import Trajectory, Version
from tianflow.errors import RankLostError
from tianflow.hosts.compute import Compute
from tianflow.interfaces import LearnerBatch, LiveSettings, StepResult

STEPS = 4
CPU = torch.device("cpu")


class Noting:
    """An algorithm that remembers what it gets, and returns a priority for each item."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.asked: list[object] = []

    def set_live(self, learning_rate: float, entropy_cost: float) -> None: ...

    def step(self, batch: LearnerBatch, *should_stop: object) -> StepResult:
        self.asked += should_stop
        self.batches.append({name: value.clone() for name, value in batch.arrays.items()})
        weight = batch.arrays.get("weight")
        return StepResult(1, True, {}, None if weight is None else weight.numpy() * 2.0)


def slots(layout: Any, count: int) -> list[dict[str, NDArray[Any]]]:
    """Slots whose rewards are the number of their slot, and of the column."""
    found = []
    for slot in range(count):
        arrays = views(layout, np.zeros(layout.nbytes, np.uint8))
        arrays["reward"][:] = 100 * slot + np.arange(layout.num_envs)
        found.append(arrays)
    return found


def trajectories(count: int) -> tuple[Trajectory, ...]:
    return tuple(Trajectory(slot, slot, STEPS, 2, Version(1, 0)) for slot in range(count))


def rewards(batch: dict[str, Any]) -> list[float]:
    return batch["reward"][0].tolist()  # type: ignore[no-any-return]


def test_each_rank_gets_its_trajectories(tmp_path: Path) -> None:
    layout = make_layout(SPEC, steps=STEPS, state_spec={}, return_accumulator=False)
    memory = slots(layout, 4)

    def work(ranks: Ranks) -> Noting:
        algorithm = Noting()
        trainer = BatchTrainer(
            algorithm=algorithm,  # type: ignore[arg-type]  # a fake
            make_stacker=lambda n: BatchStacker(layout=layout, trajectories=n, device=CPU),
            view=lambda trajectory: memory[trajectory.slot],
            ranks=ranks,
        )
        for count in (2, 4):  # a live change of the batch
            trainer.train(BASE, trajectories(count), Elapsed(0, 0, 0.0), lambda: True)
        return algorithm

    first, second = together(tmp_path, 2, work)
    assert [[0.0, 1.0], [0.0, 1.0, 100.0, 101.0]] == [rewards(batch) for batch in first.batches]
    assert [[100.0, 101.0], [200.0, 201.0, 300.0, 301.0]] == [
        rewards(batch) for batch in second.batches
    ]
    assert [] == first.asked == second.asked


def test_each_rank_gets_its_items_of_a_draw_and_returns_their_priorities(tmp_path: Path) -> None:
    layout = make_draw_layout(SPEC, length=1, items=6, state_spec={"h": (2,)})
    (draw,) = slots(layout, 1)
    draw["weight"][:] = np.arange(6)
    draw["state/h"][:] = np.arange(6)[:, None]

    def work(ranks: Ranks) -> Noting:
        algorithm = Noting()
        trainer = BatchTrainer(
            algorithm=algorithm,  # type: ignore[arg-type]  # a fake
            make_stacker=lambda _: DrawStacker(layout=layout, device=CPU, items=ranks.share(6)),
            view=lambda _: draw,
            ranks=ranks,
            draws=True,
        )
        trainer.train(BASE, trajectories(1), Elapsed(0, 0, 0.0), lambda: False)
        # All priorities are in the slot when any rank has returned.
        assert [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] == draw["priority"].tolist()
        return algorithm

    for rank, algorithm in enumerate(together(tmp_path, 3, work)):
        (batch,) = algorithm.batches
        own = [2.0 * rank, 2.0 * rank + 1]
        assert own == rewards(batch) == batch["weight"].tolist() == batch["state/h"][:, 1].tolist()
        assert (2, 2, 3) == tuple(batch["obs/"].shape)


def test_settings_go_with_an_order_only_if_they_have_changed(tmp_path: Path) -> None:
    changed = BASE.model_copy(
        update={"algorithm": BASE.algorithm.model_copy(update={"learning_rate": 0.5})}
    )
    lives = [LiveSettings(BASE, 1)] * 2 + [LiveSettings(changed, None)]

    def work(ranks: Ranks) -> list[Any]:
        if ranks.rank:
            return [receive_order(ranks) for _ in lives]
        sender = OrderSender(ranks)
        for updates, live in enumerate(lives):
            sender.send(live, trajectories(2), Elapsed(math.inf, updates, 0.5))
        return []

    _, orders = together(tmp_path, 2, work)
    assert [True, False, True] == [order.settings is not None for order in orders]
    assert lives[2] == orders[2].settings.live
    assert [(math.inf, number, 0.5) for number in range(3)] == [order[:3] for order in orders]
    assert {trajectories(2)} == {order.trajectories for order in orders}


def test_one_rank_alone_can_be_stopped() -> None:
    layout = make_layout(SPEC, steps=STEPS, state_spec={}, return_accumulator=False)
    memory, algorithm = slots(layout, 1), Noting()
    trainer = BatchTrainer(
        algorithm=algorithm,  # type: ignore[arg-type]  # a fake
        make_stacker=lambda n: BatchStacker(layout=layout, trajectories=n, device=CPU),
        view=lambda trajectory: memory[trajectory.slot],
    )
    stop = lambda: True  # noqa: E731 - compared below
    trainer.train(BASE, trajectories(1), Elapsed(0, 0, 0.0), stop)
    assert [stop] == algorithm.asked


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_wait_for_each_other(size: int, tmp_path: Path) -> None:
    done: list[int] = []

    def work(ranks: Ranks) -> int:
        done.append(ranks.rank)
        ranks.wait_for_all()
        return len(done)

    assert [size] * size == together(tmp_path, size, work)


class NotingStager:
    """Stages the rewards of trajectories, on any thread."""

    def __init__(self, view: Any) -> None:
        self._view = view
        self.staged: list[tuple[str, tuple[int, ...]]] = []
        self.released: list[tuple[int, ...]] = []

    def follow(self) -> bool:
        return True

    def stage(self, own: tuple[Trajectory, ...]) -> StagedBatch:
        tickets = tuple(each.ticket for each in own)
        self.staged.append((threading.current_thread().name, tickets))
        rewards = [torch.from_numpy(self._view(each)["reward"].copy()) for each in own]
        return StagedBatch(
            own,
            LearnerBatch({"reward": torch.cat(rewards, 1)}),
            0.0,
            lambda: self.released.append(tickets),
        )


def test_ranks_stage_the_batch_that_is_sent_ahead_and_drop_one_that_is_refused(
    tmp_path: Path,
) -> None:
    layout = make_layout(SPEC, steps=STEPS, state_spec={}, return_accumulator=False)
    memory = slots(layout, 8)
    first, refused, second, third = (
        tuple(Trajectory(n, n, STEPS, 2, Version(1, 0)) for n in range(begin, begin + 2))
        for begin in (0, 2, 4, 6)
    )
    live = LiveSettings(BASE, 1)

    def view(trajectory: Trajectory) -> Any:
        return memory[trajectory.slot]

    def lead(ranks: Ranks) -> None:
        sender = OrderSender(ranks)
        sender.send(live, first, Elapsed(0, 0, 0.0))
        for batch in (refused, second):
            sender.send_ahead(batch)
        sender.send(live, second, Elapsed(0, 1, 0.0), staged=True)
        sender.send(live, third, Elapsed(0, 2, 0.0))

    def follow(ranks: Ranks) -> tuple[Noting, NotingStager]:
        algorithm, stager = Noting(), NotingStager(view)
        trainer = BatchTrainer(
            algorithm=algorithm,  # type: ignore[arg-type]  # a fake
            make_stacker=lambda n: BatchStacker(layout=layout, trajectories=n, device=CPU),
            view=view,
            ranks=ranks,
            stager=stager,  # type: ignore[arg-type]  # a fake
        )
        rank = LearnerRank(
            name="learner-1",
            host="learner-1",
            settings=LatestCell(live, 0),
            compute=Compute(name="compute", on_orphan=lambda _: None),
            make=lambda: trainer,
        )
        with pytest.raises(RankLostError):  # rank 0 has left
            asyncio.run(rank.run(lambda: None))
        return algorithm, stager

    _, (algorithm, stager) = together(
        tmp_path, 2, lambda ranks: follow(ranks) if ranks.rank else lead(ranks)
    )
    assert [[100.0, 101.0], [500.0, 501.0], [700.0, 701.0]] == [
        rewards(batch) for batch in algorithm.batches
    ]
    ahead = [("staging", (3,)), ("staging", (5,))]
    assert ahead == [staged for staged in stager.staged if staged[0] == "staging"]
    assert [(1,), (7,)] == [tickets for thread, tickets in stager.staged if thread == "compute"]
    assert [(1,), (3,), (5,), (7,)] == stager.released


def test_rank_0_sends_a_batch_ahead_only_to_other_ranks() -> None:
    OrderSender(ALONE).send_ahead(trajectories(2))


def test_a_rank_that_cannot_stage_a_batch_fails(tmp_path: Path) -> None:
    class Full(NotingStager):
        def stage(self, own: tuple[Trajectory, ...]) -> StagedBatch:
            raise RuntimeError("no memory is left")

    done = threading.Event()

    def lead(ranks: Ranks) -> None:
        OrderSender(ranks).send_ahead(trajectories(2))
        assert done.wait(20.0)

    def follow(ranks: Ranks) -> None:
        trainer = BatchTrainer(
            algorithm=Noting(),  # type: ignore[arg-type]  # a fake
            make_stacker=lambda _: pytest.fail("a stacker was made"),
            view=lambda _: {},
            ranks=ranks,
            stager=Full(None),  # type: ignore[arg-type]  # a fake
        )
        rank = LearnerRank(
            name="learner-1",
            host="learner-1",
            settings=LatestCell(LiveSettings(BASE, 1), 0),
            compute=Compute(name="compute", on_orphan=lambda _: None),
            make=lambda: trainer,
        )
        try:
            with pytest.raises(RuntimeError, match="no memory is left"):
                asyncio.run(rank.run(lambda: None))
        finally:
            done.set()

    together(tmp_path, 2, lambda ranks: follow(ranks) if ranks.rank else lead(ranks))
