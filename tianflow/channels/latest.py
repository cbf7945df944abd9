"""LatestCell: a cell that holds the newest value, wakes its waiters, and never returns to an older
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=tuple[int, ...] | int)


class LatestCell(Generic[T, K]):
    """The newest value and its key (a generation or a version). A slow reader skips values, and
    never sees an older one after a newer.

    Unblocked by: `put` with a newer key.
    """

    def __init__(self, value: T, key: K) -> None:
        self._value, self._key = value, key
        self._waiters: list[asyncio.Future[None]] = []
        self._observers: list[Callable[[], None]] = []

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    @property
    def key(self) -> K:
        """The order of values: the key of the newest one."""
        return self._key

    def put(self, value: T, key: K) -> bool:
        """Overwrite with a newer value. False, and nothing happens, when ``key`` is not newer."""
        if not key > self._key:  # type: ignore[operator]  # a bound over int and tuple has no common >
            return False
        self._value, self._key = value, key
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        for observe in tuple(self._observers):  # one may end its own observing
            observe()
        return True

    def on_change(self, observe: Callable[[], None]) -> Callable[[], None]:
        """Call ``observe`` after every change, on the loop. Returns the function that ends that."""
        self._observers.append(observe)
        return lambda: self._observers.remove(observe)

    async def wait_newer_than(self, key: K) -> K:
        """Wait until the key is newer than ``key``. Returns the new key."""
        while not self._key > key:  # type: ignore[operator]  # as above
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self._key
