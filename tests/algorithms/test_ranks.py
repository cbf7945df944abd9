"""Ranks: several processes train as one learner would on the whole batch. Here they are threads,
whose learners are made before, because the initial weights come from PyTorch's global generator.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms import test_off_policy as off_policy
from tests.algorithms import test_on_policy as on_policy
from tianflow.algorithms.common import ranks as grouped
from tianflow.algorithms.common.ranks import ALONE, Ranks
from tianflow.errors import RankLostError
from tianflow.interfaces import LearnerBatch, SplitsOverRanks, StepResult

T = TypeVar("T")
CPU = torch.device("cpu")
UPDATES, BROKEN = 12, 7
"""The update ``BROKEN`` is not finite, because of one rank only."""
CLOSE = 1e-5
PATIENCE_S = 40.0


@pytest.fixture(autouse=True)
def _the_same_weights_each_time() -> None:
    """Adam divides a gradient by its size. Where it is almost zero, its rounding decides: by chance,
    a comparison of parameters would then fail.
    """
    torch.manual_seed(0)


def together(folder: Path, size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Call ``work`` with each rank of a group of ``size``, at the same time. An error of one ends
    the wait of the others.
    """

    def run(rank: int) -> T:
        return work(grouped.join(folder / "ranks", rank=rank, size=size, device=CPU))

    with pytest.MonkeyPatch.context() as options, ThreadPoolExecutor(size) as threads:
        options.setattr(grouped, "FOREVER", timedelta(seconds=PATIENCE_S))
        running = [threads.submit(run, rank) for rank in range(size)]
        errors = [error for each in running if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, RankLostError)):
            raise error  # the cause, before what it did to the other ranks
        return [each.result() for each in running]


def part(arrays: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """This rank's columns of a batch. ``version`` has no column for each environment."""

    def own(name: str, value: Tensor) -> Tensor:
        if name == "version" and value.ndim == 2:
            return value
        first = name in ("version", "weight") or name.startswith("state/")
        axis = 0 if first else 1
        where = ranks.share(value.shape[axis])
        return value[where].clone() if first else value[:, where].clone()

    return {name: own(name, value) for name, value in arrays.items()}


def trained(
    learner: Any, batches: list[dict[str, Tensor]], ranks: Ranks
) -> tuple[Any, list[StepResult]]:
    """``learner`` after an update on this rank's part of each of ``batches``."""
    ranks.copy_state(learner)
    learner.join(ranks)
    results = []
    for number, arrays in enumerate(batches):
        own = part(arrays, ranks)
        if number == BROKEN and ranks.rank == ranks.size - 1:
            own["reward"] = torch.full_like(own["reward"], math.nan)
        results.append(learner.step(LearnerBatch(own)))
    return learner, results


def same(
    one: list[StepResult], whole: list[StepResult], *, rel: float = 1e-3, abs_: float = 1e-4
) -> None:
    """Both ranks report what one rank does."""
    for number, (found, wanted) in enumerate(zip(one, whole, strict=True)):
        assert (found.samples, found.finite) == (wanted.samples, wanted.finite), number
        if found.finite:
            assert found.statistics == pytest.approx(wanted.statistics, rel=rel, abs=abs_), number


def equal(learner: Any, alone: Any) -> None:
    """Parameters and normalisers."""
    found, wanted = learner.model.buffer, alone.model.buffer
    torch.testing.assert_close(found.parameters, wanted.parameters, rtol=CLOSE, atol=CLOSE)
    for name, value in wanted.extras.items():
        torch.testing.assert_close(found.extras[name], value, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    ("name", "size", "lstm", "changes"),
    [
        ("a2c", 2, 0, {}),
        ("a2c", 2, 0, {"normalise_advantages": True}),
        ("impala", 2, 8, {}),
        ("impala", 4, 0, {"normalise_advantages": True}),
        ("ppo", 2, 0, {"epochs": 1, "minibatch_size": 1000}),
        ("ppo", 4, 8, {"epochs": 1, "minibatch_size": 1000}),
        ("ppo", 2, 8, {"epochs": 3, "minibatch_size": 1000, "target_kl": 0.05}),
    ],
)
def test_ranks_equal_one_rank_with_the_whole_batch(
    name: str, size: int, lstm: int, changes: dict[str, object], tmp_path: Path
) -> None:
    env = on_policy.spec(mask=True)
    settings = on_policy.config(name, lstm=lstm, normalise=True, **changes)
    policy, alone = on_policy.pair(settings, env)
    batches = [on_policy.rollout(policy, env, seed=seed) for seed in range(UPDATES)]
    for arrays in batches:  # ranks have different numbers of valid rows
        arrays["valid"][:, -2:] &= torch.rand(arrays["valid"][:, -2:].shape) < 0.3
    before = torch.tensor(alone.flat())
    factory = on_policy.ALGORITHMS[name]
    learners = [factory.make_learner(settings, env, CPU) for _ in range(size)]
    found = together(
        tmp_path,
        size,
        lambda ranks: trained(learners[ranks.rank], batches, ranks),
    )
    alone, whole = trained(alone, batches, ALONE)
    assert [number for number, result in enumerate(whole) if not result.finite] == [BROKEN]
    assert not torch.equal(before, torch.tensor(alone.flat()))
    for learner, results in found:
        same(results, whole)
        equal(learner, alone)
        assert learner.flat().tobytes() == found[0][0].flat().tobytes()


def test_the_last_rank_makes_an_update_not_finite_for_all(tmp_path: Path) -> None:
    env, settings = on_policy.spec(), on_policy.config("impala")
    policy, _ = on_policy.pair(settings, env)
    batches = [on_policy.rollout(policy, env, seed=seed) for seed in range(BROKEN + 1)]
    factory = on_policy.ALGORITHMS["impala"]
    learners = [factory.make_learner(settings, env, CPU) for _ in range(4)]
    found = together(tmp_path, 2, lambda ranks: trained(learners[ranks.rank], batches, ranks))
    assert [False, False] == [results[BROKEN].finite for _, results in found]
    assert [True, True] == [results[BROKEN - 1].finite for _, results in found]


@pytest.mark.parametrize(("name", "threads"), [("ppo", 2), ("impala", 1)])
def test_ranks_train_on_images_in_parts(name: str, threads: int, tmp_path: Path) -> None:
    changes = {"ppo": {"epochs": 2, "minibatch_size": 1000}, "impala": {}}[name]
    env = on_policy.spec(on_policy.DISCRETE, on_policy.IMAGE)
    settings = on_policy.config(name, network="nature_cnn", **changes)
    settings = settings.model_copy(
        update={"learner": settings.learner.model_copy(update={"threads": threads})}
    )
    policy, alone = on_policy.pair(settings, env)
    batches = [on_policy.rollout(policy, env, seed=seed) for seed in range(3)]
    factory = on_policy.ALGORITHMS[name]
    learners = [factory.make_learner(settings, env, CPU) for _ in range(4)]
    found = together(tmp_path, 2, lambda ranks: trained(learners[ranks.rank], batches, ranks))
    alone, whole = trained(alone, batches, ALONE)
    for learner, results in found:
        same(results, whole)
        equal(learner, alone)


def test_several_minibatches_take_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    """One rank has too few rows for a part in each minibatch."""
    env, settings = on_policy.spec(), on_policy.config("ppo", epochs=2, minibatch_size=4)
    policy, _ = on_policy.pair(settings, env)
    batches = [on_policy.rollout(policy, env, seed=seed) for seed in range(3)]
    for arrays in batches:
        arrays["valid"][:, 4:] = False
        arrays["valid"][0, 4] = True
    factory = on_policy.ALGORITHMS["ppo"]
    learners = [factory.make_learner(settings, env, CPU) for _ in range(4)]
    (first, one), (second, two) = together(
        tmp_path, 2, lambda ranks: trained(learners[ranks.rank], batches, ranks)
    )
    assert all(result.finite and result.samples > 0 for result in one)
    assert one == two
    assert first.flat().tobytes() == second.flat().tobytes()


@pytest.mark.parametrize(("name", "normalise"), [("dqn", True), ("dqn", False), ("r2d2", True)])
def test_ranks_of_q_learning_equal_one_rank_with_the_whole_draw(
    name: str, normalise: bool, tmp_path: Path
) -> None:
    batches = [off_policy.windows(name, seed=seed) for seed in range(UPDATES)]
    learners = [off_policy.made(name, normalise=normalise)[1] for _ in range(2)]
    found = together(
        tmp_path,
        2,
        lambda ranks: trained(learners[ranks.rank], batches, ranks),
    )
    alone, whole = trained(off_policy.made(name, normalise=normalise)[1], batches, ALONE)
    for learner, results in found:
        same(results, whole)
        equal(learner, alone)
    for number, result in enumerate(whole):
        if result.finite:
            parts = [results[number].priorities for _, results in found]
            np.testing.assert_allclose(
                np.concatenate(parts), result.priorities, rtol=1e-3, atol=1e-4
            )


@off_policy.continuous
def test_ranks_of_continuous_control_stay_equal_to_each_other(name: str, tmp_path: Path) -> None:
    """Their noise differs, so they are not those of one rank."""
    batches = [off_policy.windows(name, seed=seed) for seed in range(UPDATES)]
    learners = [off_policy.made(name)[1] for _ in range(2)]
    (first, one), (second, two) = together(
        tmp_path, 2, lambda ranks: trained(learners[ranks.rank], batches, ranks)
    )
    assert [result.finite for result in one] == [number != BROKEN for number in range(UPDATES)]
    assert [result.statistics for result in one if result.finite] == [
        result.statistics for result in two if result.finite
    ]
    assert first.flat().tobytes() == second.flat().tobytes()
    noise = [learner.generator.get_state() for learner in (first, second)]
    assert not torch.equal(*noise)


def test_a_group_of_one_changes_nothing() -> None:
    x = torch.tensor([1.0, 2.0])
    assert ALONE.add(x) is x
    assert ALONE.add_all(x) == (x,)
    assert ALONE.gather(x) == (x,)
    assert ALONE.own(x) is x
    assert ALONE.share(7) == slice(0, 7)


def test_messages_of_every_size_arrive(tmp_path: Path) -> None:
    messages = [b"", b"x", bytes(range(256)) * 15, b"y" * 4088, b"z" * 4089, b"w" * 100_000]

    def work(ranks: Ranks) -> list[bytes]:
        if ranks.rank:
            return [ranks.receive() for _ in messages]
        for message in messages:
            ranks.send(message)
        return messages

    assert [messages, messages, messages] == together(tmp_path, 3, work)


def test_parts_come_together_in_order_of_ranks(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.full((2, 3), float(ranks.rank), dtype=torch.float64)
        whole, flags = ranks.gather(x, x > 0)
        return whole, flags, ranks.own(whole)

    for rank, (whole, flags, own) in enumerate(together(tmp_path, 2, work)):
        assert [0.0] * 3 + [1.0] * 3 == whole[1].tolist()
        assert (torch.float64, torch.bool) == (whole.dtype, flags.dtype)
        assert [False] * 3 + [True] * 3 == flags[0].tolist()
        assert own.tolist() == [[float(rank)] * 3] * 2


def test_the_state_of_rank_0_is_that_of_all(tmp_path: Path) -> None:
    learners = [off_policy.made("sac", seed=seed)[1] for seed in range(2)]

    def work(ranks: Ranks) -> Any:
        learner = learners[ranks.rank]
        ranks.copy_state(learner)
        return learner.state_dict()

    first, second = together(tmp_path, 2, work)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def exchange_forever(ranks: Ranks) -> None:
    while True:
        ranks.add(torch.zeros(1))


def test_the_loss_of_a_rank_is_an_error_of_the_others(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        if ranks.rank:
            ranks.add(torch.zeros(1))
            del ranks
            return "left"
        ranks.add(torch.zeros(1))
        with pytest.raises(RankLostError, match="another rank of the learner is gone"):
            exchange_forever(ranks)
        return "noticed"

    assert ["noticed", "left"] == together(tmp_path, 2, work)


class PretendedNccl:
    """NCCL's interface over gloo, which exchanges data of a CPU."""

    made: ClassVar[list[PretendedNccl]] = []

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.options, self.used = options, 0
        self._group = grouped._gloo(store, rank, size)
        self.made.append(self)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.used += 1
        return self._group.allreduce(tensors)

    def allgather(self, found: list[list[Tensor]], own: list[Tensor]) -> Any:
        self.used += 1
        return self._group.allgather(found, own)


def test_ranks_on_gpus_exchange_data_by_nccl_and_messages_by_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped.dist, "ProcessGroupNCCL", PretendedNccl, raising=False)
    monkeypatch.setattr(PretendedNccl, "made", [])
    monkeypatch.setattr(grouped, "_NCCL_GROUPS", [])
    monkeypatch.setenv(grouped.NCCL_INTERFACE, "")
    monkeypatch.delenv(grouped.NCCL_INTERFACE)
    env, settings = on_policy.spec(), on_policy.config("impala", normalise=True)
    policy, alone = on_policy.pair(settings, env)
    batches = [on_policy.rollout(policy, env, seed=seed) for seed in range(3)]
    learners = [on_policy.ALGORITHMS["impala"].make_learner(settings, env, CPU) for _ in range(2)]

    def work(rank: int) -> Any:
        gpu = torch.device("cuda", rank)
        ranks = grouped.join(tmp_path / "ranks", rank=rank, size=2, device=gpu)
        ranks.copy_state(learners[rank])
        assert [0] * len(PretendedNccl.made) == [group.used for group in PretendedNccl.made]
        ranks.wait_for_all()
        learners[rank].join(ranks)
        for arrays in batches:
            learners[rank].step(LearnerBatch(part(arrays, ranks)))
        return learners[rank]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(work, range(2)))
    for arrays in batches:
        alone.step(LearnerBatch(arrays))
    for learner in found:
        equal(learner, alone)
    assert [grouped.FOREVER] * 2 == [group.options._timeout for group in PretendedNccl.made]
    assert all(group.used for group in PretendedNccl.made)
    assert set(PretendedNccl.made) == set(grouped._NCCL_GROUPS)
    assert "lo" == os.environ[grouped.NCCL_INTERFACE]


def test_built_in_learners_declare_what_they_can_do() -> None:
    for name in on_policy.ALGORITHMS:
        _, learner = on_policy.pair(on_policy.config(name), on_policy.spec())
        assert isinstance(learner, SplitsOverRanks)
        assert learner.settings.splits_over_ranks
    for name in off_policy.FACTORIES:
        _, learner = off_policy.made(name)
        assert isinstance(learner, SplitsOverRanks)
        assert learner.settings.splits_over_ranks
