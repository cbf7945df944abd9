"""Waiting for an answer to what was asked already, and whoever is cancelled while it waits: nothing
is lost, asked or answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def uncollected(future: asyncio.Future[T | None] | None) -> T | None:
    """The result that already lies in ``future``; None when there is none."""
    if future is None or not future.done() or future.cancelled():
        return None
    return future.result()


class PendingRequest(Coroutine[Any, Any, T]):
    """``waiting``, which is cancelled where it waits even if it has not begun to: what was asked
    for is always taken back.
    """

    def __init__(self, waiting: Coroutine[Any, Any, T]) -> None:
        self._waiting, self._begun = waiting, False

    def send(self, value: Any) -> Any:
        self._begun = True
        return self._waiting.send(value)

    def throw(self, *error: Any) -> Any:
        if not self._begun:
            self.send(None)
        return self._waiting.throw(*error)

    def close(self) -> None:
        self._waiting.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._waiting.__await__()


class ImmediateAnswer(Coroutine[Any, Any, T]):
    """``value`` is there, and whoever waits for it does not wait. As with `PendingRequest`, who is
    cancelled before gets it all the same.
    """

    def __init__(self, value: T) -> None:
        self._value = value

    def send(self, _: Any) -> Any:
        raise StopIteration(self._value)

    def throw(self, *_: Any) -> Any:
        raise StopIteration(self._value)

    def close(self) -> None: ...

    def __await__(self) -> Generator[Any, None, T]:
        yield from ()
        return self._value
