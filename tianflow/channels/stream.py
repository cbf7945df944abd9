"""Numbered messages that survive the connections that carry them: sent again after a reconnection,
accepted once, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from tianflow.channels.frames import MalformedMessageError

T = TypeVar("T")
WINDOW = 256
"""Messages on their way at most. It is far below what a socket of ZeroMQ queues (1,000), so a
connection never refuses one.
"""


class ReliableStream(Generic[T]):
    """One end of a stream in both directions. Plain data: its user sends what `due` gives.

    The other end acknowledges the number of the last message that it accepted. Until then a message
    stays here. The messages that are not acknowledged are due again after `connected`.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._acknowledged = 0
        """Number of the last message that the other end has accepted. ``_items`` follow it."""
        self._sent = 0
        """Number of the last message that was sent on this connection."""
        self._open = False
        self.received = 0
        """Number of the last message that this end has accepted."""

    def __len__(self) -> int:
        """Messages that are not acknowledged."""
        return len(self._items)

    def post(self, item: T) -> None:
        """Send ``item`` after all others."""
        self._items.append(item)

    def connected(self, received: int) -> None:
        """A connection stands, and the other end has accepted the messages up to ``received``.

        Raises:
            MalformedMessageError: such a message was never posted.
        """
        self.acknowledge(received)
        self._sent, self._open = self._acknowledged, True

    def disconnected(self) -> None:
        """The connection is lost: nothing is due until the next one."""
        self._open = False

    def due(self) -> Iterator[tuple[int, T]]:
        """The messages to send now, with their numbers. What is yielded counts as sent."""
        while self._open and self._sent - self._acknowledged < min(WINDOW, len(self._items)):
            item = self._items[self._sent - self._acknowledged]
            self._sent += 1
            yield self._sent, item

    def acknowledge(self, number: int) -> None:
        """The other end has accepted the messages up to ``number``. An old number has no effect.

        Raises:
            MalformedMessageError: such a message was never posted.
        """
        if number > self._acknowledged + len(self._items):
            raise MalformedMessageError(f"message {number} is acknowledged and was never sent")
        while self._acknowledged < number:
            self._items.popleft()
            self._acknowledged += 1
        self._sent = max(self._sent, self._acknowledged)

    def accept(self, number: int) -> bool:
        """True if the message ``number`` is the next one; False if it came before.

        Raises:
            MalformedMessageError: one between them is missing.
        """
        accepted = accepts(self.received, number)
        if accepted:
            self.received = number
        return accepted


def accepts(received: int, number: int) -> bool:
    """True if ``number`` follows ``received``; False for a message that is a repetition.

    Raises:
        MalformedMessageError: a message between them is missing.
    """
    if number > received + 1:
        raise MalformedMessageError(f"message {number} follows message {received}")
    return number == received + 1
