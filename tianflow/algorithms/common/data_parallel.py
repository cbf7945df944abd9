"""Parts of a batch learned from on several threads at once, each with a gradient of its own.

PyTorch's own threads share each operation, and meet after it: with convolutions of this size they
wait for one another, the more so where a core is an actor's, too. Threads that have whole parts of
a batch meet once an optimiser step.
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
    """Twins of a model, and a thread for each but the model itself, which works on the thread that
    asks.

    Who does what is fixed, and gradients are added in one order, so results do not depend on who is
    quicker.

    Args:
        model: whose parameters and gradient count.
        size: how many work at once, the caller included. With 1 there are no threads.
    """

    def __init__(self, model: ActorCriticModel, size: int) -> None:
        self.size = size
        self._members = [model, *(model.twin() for _ in range(size - 1))]
        self._helpers = [_Helper() for _ in range(size - 1)]
        if self._helpers:
            torch.set_num_threads(1)  # those of each operation, in place of which these are

    def each(
        self, function: Callable[[ActorCriticModel, Item], Found], items: Sequence[Item]
    ) -> list[Found]:
        """``function`` of every item, in their order; item k is done by member k modulo ``size``,
        after that member's earlier ones.

        Raises:
            Exception: the first, in the order of members, of what was raised; everybody has ended
                by then.
        """

        def share(k: int) -> list[Found]:
            return [function(self._members[k], item) for item in items[k :: self.size]]

        asked = [
            helper.ask(lambda k=k: share(k))  # type: ignore[misc]
            for k, helper in enumerate(self._helpers, 1)
            if k < len(items)
        ]
        try:
            shares = [share(0)]
        finally:
            answers = [answer() for answer in asked]
        for found, error in answers:
            if error is not None:
                raise error
            shares.append(found)
        return [shares[k % self.size][k // self.size] for k in range(len(items))]

    def gather(self) -> None:
        """Add everybody's gradient to the model's."""
        total = self._members[0].gradients
        for twin in self._members[1:]:
            total += twin.gradients
            twin.gradients.zero_()

    def forget(self) -> None:
        """Clear everybody's gradient."""
        for member in self._members:
            member.gradients.zero_()


class _Helper:
    """A thread that does one thing after the other. It is a daemon, as the compute thread is:
    nobody waits for its end.
    """

    def __init__(self) -> None:
        # Bounded by one: who asks waits for the answer before it asks again.
        self._asked: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="crew", daemon=True).start()

    def ask(self, function: Callable[[], Any]) -> Callable[[], tuple[Any, BaseException | None]]:
        """Have it called; what comes back waits for its result or error."""
        grad = torch.is_grad_enabled()  # which is the asking thread's own

        def call() -> Any:
            with torch.set_grad_enabled(grad):
                return function()

        self._asked.put(call)
        return self._answers.get

    def _work(self) -> None:
        torch.set_num_threads(1)  # OpenMP keeps that by thread
        while True:
            call = self._asked.get()
            try:
                self._answers.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - it belongs to who asked
                self._answers.put((None, error))
            del call  # a waiting thread must not keep a batch alive
