"""Staging: the columns of a batch on a device are those of a stacker, and a slot is free only after
its copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.algorithms import test_on_policy as on_policy
from tests.components.test_stacking import LAYOUT, B, N, T, spoilt, trajectory
from tests.support.pretended_device import pretended_device
from tests.support.settings import cartpole
from tianflow.channels.arena import Arena
from tianflow.channels.memory import HeapSlots, heap_arena
from tianflow.components import pinned_slots
from tianflow.components.batch_trainer import BatchTrainer
from tianflow.components.pinned_slots import PinnedSlots
from tianflow.components.stacking import BatchStacker, DrawStacker
from tianflow.components.staging import BatchColumns, CopyStream, DrawColumns, SlotStager
from tianflow.config.model import Config
from tianflow.config.schedules import Elapsed
from tianflow.coordinator.slot_manager import SlotManager
from tianflow.core.layout import make_draw_layout, make_layout
from tianflow.core.payloads import Trajectory, Version, aligned
from tianflow.errors import ConfigError
from tianflow.planning.memory import slots_capacity

CPU = torch.device("cpu")


class DeferredCopies(TorchDispatchMode):
    """Copies that do not happen before they are run, as on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default or func is torch.ops.aten._foreach_copy_.default:
            self.waiting.append((func, args, kwargs or {}))
            return args[0] if func is torch.ops.aten.copy_.default else None
        return func(*args, **(kwargs or {}))

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for func, args, kwargs in waiting:
            func(*args, **kwargs)


class PretendedStream(CopyStream):
    """`CopyStream` without a GPU. Its copies happen in `wait`, if they are ``deferred``."""

    def __init__(self, *, deferred: bool = True) -> None:
        self._copies = DeferredCopies() if deferred else None
        self.marks, self.waited_for = 0, []

    @contextmanager
    def use(self) -> Iterator[None]:
        if self._copies is None:
            yield
        else:
            with self._copies:
                yield

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def start_after(self, mark: int) -> None:
        self.waited_for.append(mark)

    def wait(self) -> None:
        if self._copies is not None:
            self._copies.run()


class Runtime:
    """CUDA's runtime: which memory is pinned."""

    def __init__(self, *, error: int = 0, most: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self._error, self._most = error, most

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert not self.pinned, "a part of it is pinned already"
        assert flags == 0
        if self._error or (self._most is not None and nbytes > self._most):
            return self._error or 2
        self.pinned[start] = nbytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802 - likewise
        del self.pinned[start]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(pinned_slots.torch.cuda, "cudart", lambda: found)
    return found


def stager_of(
    arena: Arena,
    columns: BatchColumns | DrawColumns,
    device: torch.device = CPU,
    stream: PretendedStream | None = None,
) -> SlotStager:
    return SlotStager(
        arena=arena,
        columns=columns,
        device=device,
        stream=stream or PretendedStream(),
        pinned=PinnedSlots(arena, "learner"),
    )


def filled(lengths: Sequence[int]) -> tuple[Arena, tuple[Trajectory, ...]]:
    """Slots in another order than the trajectories, with garbage behind their ends."""
    arena = heap_arena(LAYOUT, len(lengths))
    arena.slots = len(lengths)
    found = []
    for index, length in enumerate(lengths):
        slot = (index + 1) % len(lengths)
        for name, array in spoilt(trajectory(index), length).items():
            arena.views(slot)[name][...] = array
        found.append(Trajectory(index, slot, length, length * N, Version(1, index)))
    return arena, tuple(found)


def stacked(arena: Arena, trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    stacker = BatchStacker(layout=arena.layout, trajectories=len(trajectories), device=CPU)
    for index, each in enumerate(trajectories):
        stacker.fill(index, arena.views(each.slot), each.length)
    return {name: tensor.clone() for name, tensor in stacker.batch().arrays.items()}


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(expected) == set(found)
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape), name
        assert torch.equal(tensor.nan_to_num(7.0), found[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("lengths", [[T] * B, [T, 1, T, 3], [2], [T - 1, T]])
def test_staged_columns_are_those_of_a_stacker(lengths: list[int], runtime: Runtime) -> None:
    arena, trajectories = filled(lengths)
    stager = stager_of(arena, BatchColumns(LAYOUT), stream=PretendedStream(deferred=False))
    for _ in range(2):  # into used memory, too
        staged = stager.stage(trajectories)
        same(staged.batch.arrays, stacked(arena, trajectories))
        assert trajectories == staged.trajectories
        staged.release()


def test_a_slot_may_be_overwritten_once_it_was_staged(runtime: Runtime) -> None:
    arena, trajectories = filled([T] * B)
    expected = stacked(arena, trajectories)
    staged = stager_of(arena, BatchColumns(LAYOUT)).stage(trajectories)
    arena.memory(B)[:] = 0xAB
    same(staged.batch.arrays, expected)


def test_a_batch_is_staged_beside_the_one_that_is_trained_on(runtime: Runtime) -> None:
    arena, trajectories = filled([T] * B)
    stream = PretendedStream()
    stager = stager_of(arena, BatchColumns(LAYOUT), stream=stream)
    first = stager.stage(trajectories[:2])
    before = {name: tensor.clone() for name, tensor in first.batch.arrays.items()}
    second = stager.stage(trajectories[2:])
    same(first.batch.arrays, before)
    same(second.batch.arrays, stacked(arena, trajectories[2:]))

    stream.waited_for.clear()
    first.release()
    third = stager.stage(trajectories[1:3])
    # its memory is overwritten after all that the computing stream was given before the release
    assert [stream.marks] == stream.waited_for
    memory = [batch.batch.arrays["reward"].data_ptr() for batch in (first, second, third)]
    assert memory[0] == memory[2] != memory[1]


def test_columns_of_another_size_are_dropped(runtime: Runtime) -> None:
    """A live change of the number of trajectories in a batch."""
    arena, trajectories = filled([T] * B)
    stager = stager_of(arena, BatchColumns(LAYOUT))
    for count in (2, B, 1, 2):
        staged = stager.stage(trajectories[:count])
        same(staged.batch.arrays, stacked(arena, trajectories[:count]))
        staged.release()
        assert 1 == len(stager._free)


@pytest.mark.parametrize("items", [slice(0, 6), slice(2, 4)])
def test_a_staged_draw_is_that_of_a_stacker(items: slice, runtime: Runtime) -> None:
    spec = on_policy.spec(on_policy.DISCRETE, on_policy.LEAF)
    layout = make_draw_layout(spec, length=3, items=6, state_spec={"h": (2,)})
    arena = heap_arena(layout, 2)
    arena.slots = 2
    draw = np.random.default_rng(3).integers(0, 2, arena.memory(2).nbytes, np.uint8)
    arena.memory(2)[:] = draw
    stacker = DrawStacker(layout=layout, device=CPU, items=items)
    stacker.fill(0, arena.views(1), 3)
    staged = stager_of(arena, DrawColumns(layout, items)).stage(
        (Trajectory(0, 1, 3, 6, Version(1, 0)),)
    )
    same(staged.batch.arrays, stacker.batch().arrays)


# Pinning
# --------------------------------------------------------------------------------------------------


def test_slots_that_are_added_are_pinned_too(runtime: Runtime) -> None:
    arena = heap_arena(LAYOUT, 8)
    arena.slots = 2
    pinned = PinnedSlots(arena, "learner")
    start = arena.memory(1).ctypes.data
    for slots in (2, 2, 5):
        arena.slots = slots
        assert pinned.follow()
        assert {start: arena.memory(slots).nbytes} == runtime.pinned


def test_slots_are_pinned_as_far_as_the_memory_limit_lets_them_grow(runtime: Runtime) -> None:
    """A live change of the number of actors adds slots, up to the limit of memory."""
    each = aligned(LAYOUT.nbytes)

    def config(actors: int) -> Config:
        return cartpole(
            balance={"memory_limit": 8 * each},
            algorithm={"batch_trajectories": 2},
            actors={"count": actors},
        )

    capacity = slots_capacity(config(1), LAYOUT)
    owner = HeapSlots(layout=LAYOUT, capacity=capacity)
    manager = SlotManager(owner=owner, layout=LAYOUT)
    exchange = manager.open(config(1), clock=lambda: 0.0, schedule=lambda _: (0, 1.0), resumed=None)
    pinned, before = PinnedSlots(owner.arena, "learner"), owner.arena.slots
    for actors in (1, 2, 4):
        manager.grow(config(actors), exchange)
        assert pinned.follow()
        assert [owner.arena.slots * each] == list(runtime.pinned.values())
    assert before < owner.arena.slots <= capacity
    with pytest.raises(ConfigError, match="memory limit"):
        manager.check(config(16))
    manager.grow(config(16), exchange)
    assert pinned.follow()
    assert sum(runtime.pinned.values()) <= 8 * each


@pytest.mark.parametrize("refused", ["from the start", "when slots are added"])
def test_slots_that_cannot_be_pinned_are_copied_by_a_stacker(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says so."""
    arena, trajectories = filled([T] * B)
    most = 0 if refused == "from the start" else arena.memory(2).nbytes
    runtime = Runtime(most=most)
    monkeypatch.setattr(pinned_slots.torch.cuda, "cudart", lambda: runtime)
    arena.slots = 2
    made = []

    def make_stacker(count: int) -> BatchStacker:
        made.append(count)
        return BatchStacker(layout=LAYOUT, trajectories=count, device=CPU)

    trainer = BatchTrainer(
        algorithm=None,  # type: ignore[arg-type]  # it is not trained
        make_stacker=make_stacker,
        view=lambda each: arena.views(each.slot),
        stager=stager_of(arena, BatchColumns(LAYOUT)),
    )
    for slots in (2, B, B):
        arena.slots = slots
        staged = trainer.stage(trajectories)
        same(staged.batch.arrays, stacked(arena, trajectories))
        staged.release()
    assert [B] == made
    assert 1 == caplog.text.count("the slots cannot be pinned")


# With a learner
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [False, True])
def test_a_learner_on_a_device_trains_on_staged_slots_as_one_on_a_cpu(
    cut: bool, runtime: Runtime
) -> None:
    env, settings = on_policy.spec(mask=True), on_policy.config("impala", normalise=True)
    policy, cpu = on_policy.pair(settings, env)
    layout = make_layout(env, steps=on_policy.T, state_spec={}, return_accumulator=True)
    arena = heap_arena(layout, 2)
    arena.slots = 2
    trajectories = []
    for slot in range(2):
        for name, value in on_policy.rollout(policy, env, seed=slot).items():
            if name in arena.views(slot) and name != "version":
                arena.views(slot)[name][...] = value.numpy()
        arena.views(slot)["version"][:] = 1
        length = 3 if cut and slot else on_policy.T
        trajectories.append(Trajectory(slot, slot, length, length * on_policy.N, Version(1, 1)))

    def trained(learner: Any, stager: SlotStager | None) -> Any:
        trainer = BatchTrainer(
            algorithm=learner,
            make_stacker=lambda n: BatchStacker(layout=layout, trajectories=n, device=CPU),
            view=lambda each: arena.views(each.slot),
            stager=stager,
        )
        assert (stager is not None) == trainer.stages_ahead
        staged = trainer.stage(trajectories) if trainer.stages_ahead else None
        for _ in range(3):
            found = trainer.train(settings, trajectories, Elapsed(0, 0, 0.0), lambda: False, staged)
        return found.result

    expected = trained(cpu, None)
    with pretended_device() as device:
        there = on_policy.ALGORITHMS["impala"].make_learner(settings, env, device)
        stream = PretendedStream(deferred=False)
        found = trained(there, stager_of(arena, BatchColumns(layout), device, stream))
    assert expected.samples == found.samples
    assert expected.statistics == pytest.approx(found.statistics, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(
        there.model.buffer.parameters, cpu.model.buffer.parameters, rtol=0.0, atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[T] * B, [T, 1, T, 3]])
def test_a_gpu_stages_the_columns_of_a_stacker(lengths: list[int]) -> None:
    arena, trajectories = filled(lengths)
    device = torch.device("cuda", 0)
    stager = SlotStager(
        arena=arena,
        columns=BatchColumns(LAYOUT),
        device=device,
        stream=CopyStream(device),
        pinned=PinnedSlots(arena, "learner"),
    )
    assert stager.follow()
    expected = stacked(arena, trajectories)
    batches = [stager.stage(trajectories) for _ in range(2)]
    arena.memory(len(lengths))[:] = 0xAB
    for staged in batches:
        same({name: value.cpu() for name, value in staged.batch.arrays.items()}, expected)
        staged.release()
    torch.cuda.cudart().cudaHostUnregister(arena.memory(1).ctypes.data)  # type: ignore[no-untyped-call]
