"""Doorbell: wakes the compute thread of a host, from any thread or process."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time

SELECTABLE = 1024
"""`select` knows descriptors below it. It counts microseconds, `poll` whole milliseconds."""


class Doorbell:
    """An eventfd. A ring before `wait` is not lost; several rings are one.

    The launcher makes it, so that it outlives every host at either end.

    Args:
        fd: of the eventfd; this object owns it from now on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @classmethod
    def create(cls) -> Doorbell:
        """A new doorbell."""
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        """Wake the waiter. Never waits. Does nothing after `close`."""
        if self.fd < 0:
            return
        with contextlib.suppress(BlockingIOError):  # so many rings that the counter is full
            os.eventfd_write(self.fd, 1)

    def wait(self, until: float | None = None) -> None:
        """Wait for a ring since the last `wait`, or until ``until`` (`time.monotonic`). Returns at
        once after `close`: the number may be another file's by then.
        """
        if self.fd < 0:
            return
        left = None if until is None else max(0.0, until - time.monotonic())
        if left is None:
            self._poll.poll()
        elif self.fd < SELECTABLE:
            select.select([self.fd], [], [], left)
        else:
            self._poll.poll(math.ceil(1000.0 * left))
        self.clear()

    def clear(self) -> None:
        """Forget the rings so far, for a waiter that watches ``fd`` itself."""
        if self.fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
