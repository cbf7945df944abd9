"""Ranks: several processes that train as one learner, each on its part of every batch.

Counts, statistics and gradients are added up over the ranks before they are used. Each rank then
takes the same optimiser step, so all ranks have the same parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed

from tianflow.errors import RankLostError

if TYPE_CHECKING:
    from pathlib import Path

    from tianflow.interfaces import Algorithm

dist: Any = distributed
"""PyTorch's stubs lack the classes of groups, which are built in C++."""
FOREVER = timedelta(days=365)
"""Time limit of a collective. A paused run waits for its next update without limit, and the
supervisor ends a group with a rank that does not answer.
"""
FRAME_BYTES = 4096
"""Size of the first part of a message between ranks."""
LENGTH_BYTES = 8
"""A message begins with its length."""
_NCCL_GROUPS: list[Any] = []
"""All NCCL groups of this process. A group that is deleted waits for its communicators. A rank that
leaves must not wait, and the end of its process frees everything.
"""
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""NCCL's variable for the network interface. By itself it avoids the loopback interface."""


class Ranks:
    """This rank among all of its group. This class is the group of one: its methods return what
    they get.

    Attributes:
        rank: number of this rank, from 0. Rank 0 is the learner that publishes.
        size: number of ranks.
    """

    rank = 0
    size = 1

    @property
    def ahead(self) -> Ranks:
        """The same group for messages of another thread."""
        return self

    def add(self, tensor: Tensor) -> Tensor:
        """``tensor``, summed over the ranks in place. Each rank gets the same sum.

        Raises:
            RankLostError: another rank is gone. All methods raise it.
        """
        return tensor

    def add_all(self, *scalars: Tensor) -> tuple[Tensor, ...]:
        """`add` of several scalars, as float32, in one exchange."""
        return scalars

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """[..., C] of this rank -> [..., ranks * C] of all, in order of ranks, in one exchange. All
        tensors have the same shape. They travel as float32, or as float64 if one is.
        """
        return parts

    def own(self, whole: Tensor) -> Tensor:
        """The part of this rank in a result of `gather`."""
        return whole

    def share(self, count: int) -> slice:
        """The part of this rank in ``count`` items, which the number of ranks divides."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def send(self, message: bytes) -> None:
        """Send ``message`` to all other ranks. Called by rank 0."""

    def receive(self) -> bytes:
        """Wait for the next message of rank 0."""
        raise RuntimeError("rank 0 sends messages, and receives none")

    def wait_for_all(self) -> None:
        """Return when all ranks have called it."""

    def copy_state(self, algorithm: Algorithm) -> None:
        """Overwrite the state of ``algorithm`` with that of rank 0."""


ALONE = Ranks()
"""The group of one."""


class GroupedRanks(Ranks):
    """A group of several ranks, joined by torch.distributed.

    Args:
        rank: number of this rank.
        size: number of ranks.
        control: group for messages and state, on CPUs (gloo).
        data: group for counts, statistics and gradients on the learner's device.
        ahead: group for messages of another thread, on CPUs.
    """

    def __init__(self, rank: int, size: int, *, control: Any, data: Any, ahead: Any = None) -> None:
        self.rank, self.size, self._control, self._data = rank, size, control, data
        self._ahead = ahead

    @property
    def ahead(self) -> Ranks:
        return GroupedRanks(self.rank, self.size, control=self._ahead, data=self._ahead)

    def add(self, tensor: Tensor) -> Tensor:
        _wait(lambda: self._data.allreduce([tensor]))
        return tensor

    def add_all(self, *scalars: Tensor) -> tuple[Tensor, ...]:
        return self.add(torch.stack([scalar.detach().float() for scalar in scalars])).unbind()

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        wide = any(part.dtype == torch.float64 for part in parts)
        own = torch.stack(
            [part.detach().to(torch.float64 if wide else torch.float32) for part in parts]
        )
        found = [torch.empty_like(own) for _ in range(self.size)]
        _wait(lambda: self._data.allgather([found], [own]))
        whole = torch.cat(found, -1)
        return tuple(whole[k].to(part.dtype) for k, part in enumerate(parts))

    def own(self, whole: Tensor) -> Tensor:
        return whole[..., self.share(whole.shape[-1])]

    def send(self, message: bytes) -> None:
        data = len(message).to_bytes(LENGTH_BYTES, "little") + message
        self._broadcast(np.frombuffer(data[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0"), np.uint8))
        if len(data) > FRAME_BYTES:
            self._broadcast(np.frombuffer(data[FRAME_BYTES:], np.uint8))

    def receive(self) -> bytes:
        first = self._broadcast(np.empty(FRAME_BYTES, np.uint8)).tobytes()
        length = int.from_bytes(first[:LENGTH_BYTES], "little")
        data = first[LENGTH_BYTES : LENGTH_BYTES + length]
        if length > len(data):
            data += self._broadcast(np.empty(length - len(data), np.uint8)).tobytes()
        return data

    def wait_for_all(self) -> None:
        _wait(self._control.barrier)

    def copy_state(self, algorithm: Algorithm) -> None:
        state = algorithm.state_dict()
        found: dict[str, Any] = {}
        for name in sorted(state):
            bytes_ = np.frombuffer(np.ascontiguousarray(state[name]).tobytes(), np.uint8)
            received = self._broadcast(bytes_) if bytes_.size else bytes_
            found[name] = received.view(state[name].dtype).reshape(state[name].shape)
        if self.rank:
            algorithm.load_state_dict(found)

    def _broadcast(
        self, data: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        tensor = torch.from_numpy(data.copy())
        _wait(lambda: self._control.broadcast(tensor, 0))
        return tensor.numpy()


def join(rendezvous: Path, *, rank: int, size: int, device: torch.device) -> Ranks:
    """Wait until all ranks of a group have joined.

    Args:
        rendezvous: file through which the ranks find each other. No other group uses it.
        rank: number of this rank.
        size: number of ranks.
        device: of the learner: ranks on GPUs exchange data by NCCL, others by gloo.

    Raises:
        RankLostError: another rank is gone.
    """
    store = dist.FileStore(str(rendezvous), size)
    try:
        control, ahead = (
            _gloo(dist.PrefixStore(name, store), rank, size) for name in ("control", "ahead")
        )
        data = control
        if device.type == "cuda":
            os.environ.setdefault(NCCL_INTERFACE, "lo")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = FOREVER  # noqa: SLF001 - it has no other name
            data = dist.ProcessGroupNCCL(dist.PrefixStore("data", store), rank, size, options)
            _NCCL_GROUPS.append(data)
    except RuntimeError as error:
        raise RankLostError(f"the ranks of the learner cannot join: {error}") from error
    return GroupedRanks(rank, size, control=control, data=data, ahead=ahead)


def _gloo(store: Any, rank: int, size: int) -> Any:
    """A gloo group whose connections stay on the loopback interface."""
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - the only way to name the interface of one group
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001 - likewise
    options._timeout = FOREVER  # noqa: SLF001 - likewise
    return dist.ProcessGroupGloo(store, rank, size, options)


def _wait(begin: Callable[[], Any]) -> None:
    """Wait for a collective."""
    try:
        begin().wait()
    except RuntimeError as error:
        raise RankLostError(f"another rank of the learner is gone: {error}") from error


def seed_of_rank(seed: int, rank: int) -> int:
    """Seed of a rank's own random numbers; that of the run for rank 0."""
    if rank == 0:
        return seed
    return int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
