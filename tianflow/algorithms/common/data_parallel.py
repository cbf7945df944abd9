"""Data parallelism over threads: each thread trains on whole parts of a batch, with its own
gradient.

PyTorch's own threads split each operation and wait for each other after it. With convolutions of
this size the waiting dominates, especially if actors share the cores. Threads with whole parts of a
batch wait once per optimiser step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from tianflow.algorithms.common.model import ActorCriticModel

Item = TypeVar("Item")
Found = TypeVar("Found")


class DataParallel:
    """Replicas of a model, one thread per replica. The model itself works on the calling thread.

    The assignment of parts and the order of additions are fixed, so results do not depend on
    timing.

    Args:
        model: model whose parameters and gradient are used.
        size: number of parallel parts, including the caller. With 1 there are no threads.
    """

    def __init__(self, model: ActorCriticModel, size: int) -> None:
        self.size = size
        self._models = [model, *(model.replica() for _ in range(size - 1))]
        self._workers = [_Worker() for _ in range(size - 1)]
        if self._workers:
            torch.set_num_threads(1)  # these threads replace PyTorch's threads of each operation

    def map(
        self, function: Callable[[ActorCriticModel, Item], Found], items: Sequence[Item]
    ) -> list[Found]:
        """``function`` of every item, in order. Item k is processed by model k modulo ``size``.

        Raises:
            Exception: the first exception in order of models, after all threads have finished.
        """

        def share(k: int) -> list[Found]:
            return [function(self._models[k], item) for item in items[k :: self.size]]

        pending = [
            worker.submit(lambda k=k: share(k))  # type: ignore[misc]
            for k, worker in enumerate(self._workers, 1)
            if k < len(items)
        ]
        try:
            shares = [share(0)]
        finally:
            answers = [answer() for answer in pending]
        for found, error in answers:
            if error is not None:
                raise error
            shares.append(found)
        return [shares[k % self.size][k // self.size] for k in range(len(items))]

    def sum_gradients(self) -> None:
        """Add the gradients of all replicas to the model's gradient."""
        total = self._models[0].gradients
        for replica in self._models[1:]:
            total += replica.gradients
            replica.gradients.zero_()

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        for model in self._models:
            model.gradients.zero_()


class _Worker:
    """A thread that executes one function after the other. It is a daemon; its end is not
    awaited.
    """

    def __init__(self) -> None:
        # At most one entry: the caller waits for the answer before the next submission.
        self._tasks: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="data-parallel", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Callable[[], tuple[Any, BaseException | None]]:
        """Execute ``function``. The returned function waits for its result or exception."""
        grad = torch.is_grad_enabled()  # grad mode belongs to the calling thread

        def call() -> Any:
            with torch.set_grad_enabled(grad):
                return function()

        self._tasks.put(call)
        return self._answers.get

    def _work(self) -> None:
        torch.set_num_threads(1)  # OpenMP stores the number per thread
        while True:
            call = self._tasks.get()
            try:
                self._answers.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                self._answers.put((None, error))
            del call  # a waiting thread must not hold a batch in memory
