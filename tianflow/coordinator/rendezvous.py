"""Rendezvous: files through which the ranks of a learner find each other."""

from __future__ import annotations

import os
from pathlib import Path


class Rendezvous:
    """One file in memory for each group of ranks. It needs no disk, no other user of the machine
    can open it, and nothing is left of it after the coordinator.
    """

    def __init__(self) -> None:
        self._incarnation, self._descriptor = -1, -1

    def file(self, incarnation: int) -> Path:
        """The file of the group whose hosts have run ``incarnation`` times before. All hosts of the
        group get the same one; that of the group before it is closed.
        """
        if incarnation != self._incarnation:
            self.close()
            self._incarnation, self._descriptor = incarnation, os.memfd_create("tianflow-ranks")
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._incarnation, self._descriptor = -1, -1
