"""Work on a compute thread that waits for another process, and lets other work run meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")


class Wait:
    """What work waits for.

    Args:
        ready: True once the wait is over. Called each time the thread wakes, so it must be cheap.
        until: the wait is over at this time (`time.monotonic`) at the latest; None: no limit.
            ``ready`` may change it.
    """

    __slots__ = ("ready", "until")

    def __init__(self, ready: Callable[[], bool], until: float | None = None) -> None:
        self.ready, self.until = ready, until

    def is_over(self, now: float) -> bool:
        """True if the work continues."""
        return self.ready() or (self.until is not None and now >= self.until)


Turns: TypeAlias = Generator[Wait, None, T]
"""Work that yields what it waits for, and returns its result."""


def without_waiting(turns: Turns[T]) -> T:
    """The result of work that does not wait.

    Raises:
        RuntimeError: it waits.
    """
    try:
        next(turns)
    except StopIteration as end:
        result: T = end.value
        return result
    turns.close()
    raise RuntimeError("this work waits for another process, so it needs a compute thread")
