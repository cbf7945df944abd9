"""slots -> SlotStager -> the columns of a batch on a GPU, without a copy by the CPU.

The GPU reads pinned slots by itself, on a stream of its own, while it computes the update before. A
trajectory crosses in one copy, and the GPU moves its rows to their columns. The batch of the next
update and the one that is trained on have columns of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tianflow.components.pinned_slots import PinnedSlots
from tianflow.components.stacking import NOT_TRAINED_ON, of_items, rows_of, stacked_shape
from tianflow.core.payloads import aligned
from tianflow.interfaces import LearnerBatch

if TYPE_CHECKING:
    from tianflow.channels.arena import Arena
    from tianflow.core.payloads import Field, Trajectory, TrajectoryLayout

Tensors = Mapping[str, Tensor]


def nothing() -> None:
    """Release nothing: default of `StagedBatch.release`."""


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch on the learner's device. All copies out of its slots are complete.

    Attributes:
        trajectories: what it consists of.
        batch: for the algorithm.
        copy_s: seconds that the copy took.
        release: called after the last use of ``batch``, whose memory is then used again.
    """

    trajectories: tuple[Trajectory, ...]
    batch: LearnerBatch
    copy_s: float
    release: Callable[[], None] = nothing


class Move(NamedTuple):
    """One copy on the device, between views of the same shape."""

    target: Tensor
    source: Tensor


class DeviceColumns(Protocol):
    """Where the fields of trajectories go."""

    def make(self, count: int, device: torch.device) -> dict[str, Tensor]:
        """Tensors for ``count`` trajectories."""

    def moves(self, columns: Tensors, landed: Tensor) -> list[Move]:
        """The copies from ``landed``, [count, bytes of a slot] uint8, to ``columns``."""

    def clear(self, columns: Tensors, lengths: Sequence[int]) -> None:
        """Overwrite what lies behind the rows of trajectories of these ``lengths``."""


class BatchColumns:
    """`tianflow.components.stacking.BatchStacker` on a GPU: trajectories side by side.

    Args:
        layout: of a trajectory.
    """

    def __init__(self, layout: TrajectoryLayout) -> None:
        self._layout = layout

    def make(self, count: int, device: torch.device) -> dict[str, Tensor]:
        return {
            field.name: torch.empty(
                stacked_shape(field.name, field.shape, count),
                dtype=getattr(torch, field.dtype),
                device=device,
            )
            for field in self._layout.fields
        }

    def moves(self, columns: Tensors, landed: Tensor) -> list[Move]:
        return [
            self._move(field, columns[field.name], landed)
            if field.name.startswith("state/")
            else _move_of_rows(field, columns[field.name], landed)
            for field in self._layout.fields
        ]

    @staticmethod
    def _move(field: Field, target: Tensor, landed: Tensor) -> Move:
        source = _field(landed, field)
        return Move(target.view(source.shape), source)

    def clear(self, columns: Tensors, lengths: Sequence[int]) -> None:
        for index, length in enumerate(lengths):
            if length < self._layout.steps:
                for name, target in columns.items():
                    self._clear(name, target, index, length)

    def _clear(self, name: str, target: Tensor, index: int, length: int) -> None:
        n = self._layout.num_envs
        if name == "version":
            target[length:, index] = target[length - 1, index].clone()
        elif not name.startswith("state/"):
            # a mask without allowed actions has no distribution
            behind = target[rows_of(name, length) :, index * n : (index + 1) * n]
            behind.fill_(1 if name == "action_mask" else 0)


class DrawColumns:
    """`tianflow.components.stacking.DrawStacker` on a GPU: one slot holds a whole batch.

    Args:
        layout: of a draw.
        items: the items of the draw that are copied.
    """

    def __init__(self, layout: TrajectoryLayout, items: slice) -> None:
        self._fields = [field for field in layout.fields if field.name not in NOT_TRAINED_ON]
        self._chosen = {field.name: of_items(field.name, items) for field in self._fields}

    def make(self, count: int, device: torch.device) -> dict[str, Tensor]:  # noqa: ARG002 - as `DeviceColumns.make`
        return {
            field.name: torch.empty(
                torch.empty(field.shape, device="meta")[self._chosen[field.name]].shape,
                dtype=getattr(torch, field.dtype),
                device=device,
            )
            for field in self._fields
        }

    def moves(self, columns: Tensors, landed: Tensor) -> list[Move]:
        return [
            Move(columns[field.name], _field(landed, field)[0][self._chosen[field.name]])
            for field in self._fields
        ]

    def clear(self, columns: Tensors, lengths: Sequence[int]) -> None:
        """No effect: a draw is whole."""


def _move_of_rows(field: Field, target: Tensor, landed: Tensor) -> Move:
    """The copy of [count, rows, ...] of ``field`` to ``target``, [rows, count, ...]. A GPU moves
    rows of words faster than rows of bytes.
    """
    count, rows = len(landed), field.shape[0]
    length = field.nbytes // rows
    word = torch.int64 if length % 8 == 0 else torch.uint8
    source = landed[:, field.offset : field.offset + field.nbytes].view(count, rows, length)
    place = target.view(torch.uint8).view(rows, count, length)
    return Move(place.view(word), source.view(word).transpose(0, 1))


def _field(landed: Tensor, field: Field) -> Tensor:
    """[count, *shape of the field], a view of ``landed``."""
    part = landed[:, field.offset : field.offset + field.nbytes]
    return part.view(getattr(torch, field.dtype)).view(len(landed), *field.shape)


class CopyStream:
    """A stream of copies beside the one that computes.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def use(self) -> Iterator[None]:
        """Everything in this context goes to the stream."""
        torch.cuda.set_device(self._device)  # of this thread: without it, the first one
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Stands for the operations that the computing stream has been given so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        return event

    def start_after(self, mark: Any) -> None:
        """Let later operations of the stream wait for those of ``mark``."""
        self._stream.wait_event(mark)

    def wait(self) -> None:
        """Sleep until all operations of the stream have ended."""
        self._done.record(self._stream)
        self._done.synchronize()


class _Place(NamedTuple):
    """Columns of one batch of trajectories.

    ``landing``: where each trajectory arrives. ``targets`` and ``sources``: the moves from there.
    All of them are views that were made once, because a view takes Python longer than a copy takes
    the GPU. ``mark``: of the last use.
    """

    columns: Tensors
    landing: tuple[Tensor, ...]
    targets: list[Tensor]
    sources: list[Tensor]
    mark: Any


class SlotStager:
    """Copies trajectories out of their slots to columns on a GPU. One thread at a time may stage;
    another one may use and release batches meanwhile.

    Args:
        arena: of the slots.
        columns: where their fields go.
        device: of the columns.
        stream: for the copies.
        pinned: pins the slots.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        columns: DeviceColumns,
        device: torch.device,
        stream: CopyStream,
        pinned: PinnedSlots,
    ) -> None:
        self._arena, self._columns, self._device = arena, columns, device
        self._stream, self._pinned = stream, pinned
        last = arena.layout.fields[-1]
        self._nbytes = aligned(last.offset + last.nbytes)
        """Bytes of a slot without its request."""
        self._landing = torch.empty(0, self._nbytes, dtype=torch.uint8, device=device)
        """Shared by all columns of one size: a batch leaves it before the next one arrives."""
        self._slots: dict[int, Tensor] = {}
        # Three batches at most have columns: one is trained on, one is staged, and a rank may have
        # one that was refused.
        self._free: list[_Place] = []

    def follow(self) -> bool:
        """Pin the slots that were added. False: they cannot be pinned."""
        with self._stream.use():
            return self._pinned.follow()

    def stage(self, trajectories: Sequence[Trajectory]) -> StagedBatch:
        """Copy ``trajectories``, and sleep until the copies are complete. Their slots are then not
        needed any more.
        """
        began = time.monotonic()
        slots = [self._slot(trajectory.slot) for trajectory in trajectories]
        place = self._place(len(trajectories))
        with self._stream.use(), torch.no_grad():
            self._stream.start_after(place.mark)
            torch._foreach_copy_(place.landing, slots, non_blocking=True)
            torch._foreach_copy_(place.targets, place.sources)
            self._columns.clear(place.columns, [trajectory.length for trajectory in trajectories])
        self._stream.wait()

        def release() -> None:
            self._free.append(place._replace(mark=self._stream.mark()))

        taken = time.monotonic() - began
        return StagedBatch(tuple(trajectories), LearnerBatch(place.columns), taken, release)

    def _place(self, count: int) -> _Place:
        """Columns for ``count`` trajectories, of no other batch. Columns of other sizes are
        dropped.
        """
        while self._free:
            place = self._free.pop()
            if len(place.landing) == count:
                return place
        if len(self._landing) != count:
            with self._stream.use():  # no other stream uses its memory
                self._landing = torch.empty(
                    count, self._nbytes, dtype=torch.uint8, device=self._device
                )
        columns = self._columns.make(count, self._device)
        moves = self._columns.moves(columns, self._landing)
        # Its memory may have been another tensor's, which the computing stream still reads.
        return _Place(
            columns,
            self._landing.unbind(),
            [move.target for move in moves],
            [move.source for move in moves],
            self._stream.mark(),
        )

    def _slot(self, slot: int) -> Tensor:
        """The bytes of ``slot``, without its request."""
        if slot not in self._slots:
            memory = self._arena.slot_memory(slot)[: self._nbytes]
            self._slots[slot] = torch.from_numpy(memory)
        return self._slots[slot]


def make_stager(
    arena: Arena, device: torch.device, items: slice | None = None
) -> SlotStager | None:
    """A stager of the trajectories in ``arena``, or with ``items`` of its draws. None on a CPU, or
    if the slots cannot be pinned.
    """
    if device.type == "cpu":
        return None
    layout = arena.layout
    stager = SlotStager(
        arena=arena,
        columns=BatchColumns(layout) if items is None else DrawColumns(layout, items),
        device=device,
        stream=CopyStream(device),
        pinned=PinnedSlots(arena, "learner"),
    )
    return stager if stager.follow() else None
