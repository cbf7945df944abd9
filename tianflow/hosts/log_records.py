"""`LinkLogHandler`: passes the log records of a host process to the coordinator, which logs them.

A host configures no output of its own: its standard error belongs to the code of the user.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tianflow.channels.messages import RecordLogged
from tianflow.logs import ROOT, details_of

MOST = 20
"""Records in `WINDOW_S`. More of them, as from a warning at every step, are counted only."""
WINDOW_S = 10.0
LONGEST = 2_000
"""Characters of a message and of each of its values."""


class LinkLogHandler(logging.Handler):
    """Sends records as `RecordLogged`. Records beyond `MOST` in `WINDOW_S` are dropped, and the
    next record says how many.

    Args:
        send: sends a message to the coordinator, from any thread.
        now: the clock, in seconds.
    """

    def __init__(
        self, send: Callable[[RecordLogged], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(logging.INFO)
        self._send, self._now = send, now
        self._guard = threading.Lock()
        self._since, self._count, self._dropped = now(), 0, 0

    def install(self) -> None:
        """Receive all records of tianflow in this process."""
        root = logging.getLogger(ROOT)
        root.addHandler(self)
        root.setLevel(logging.INFO)

    def uninstall(self) -> None:
        """Receive none."""
        logging.getLogger(ROOT).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send ``record``, or count it. A record that cannot be written is an error on standard
        error, as with every handler, and none of the code that logs.
        """
        dropped = self._admit()
        if dropped is None:
            return
        try:
            values = {name: str(value)[:LONGEST] for name, value in details_of(record).items()}
            event = record.getMessage()[:LONGEST]
        except Exception:  # noqa: BLE001 - a boundary: values of a user's code
            self.handleError(record)
            return
        if dropped:
            values["dropped_records"] = str(dropped)
        self._send(
            RecordLogged(record.levelno, record.name.removeprefix(f"{ROOT}."), event, values)
        )

    def _admit(self) -> int | None:
        """Number of records that were dropped before this one; None if it is dropped, too."""
        with self._guard:
            now = self._now()
            if now - self._since >= WINDOW_S:
                self._since, self._count = now, 0
            if self._count >= MOST:
                self._dropped += 1
                return None
            self._count += 1
            dropped, self._dropped = self._dropped, 0
            return dropped
