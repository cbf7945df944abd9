"""PendingRequest and ImmediateAnswer: waits for the answer to a request that was sent already. A
cancelled wait loses neither request nor answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def uncollected(future: asyncio.Future[T | None] | None) -> T | None:
    """The result of ``future`` if it is there already, else None."""
    if future is None or not future.done() or future.cancelled():
        return None
    return future.result()


class PendingRequest(Coroutine[Any, Any, T]):
    """``waiting``, which is cancelled where it waits even if it has not begun: the request is
    always withdrawn.
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
    """An answer that is there already: a wait for ``value`` returns at once. A caller that is
    cancelled before it waits gets the value all the same.
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
