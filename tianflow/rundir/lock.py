"""A run's directory is written by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tianflow.errors import CheckpointError
from tianflow.rundir.control_file import ControlFile


def hold(directory: Path) -> int:
    """Take ``directory``, which exists, for as long as the descriptor that is returned stays open,
    and no longer than this process lives.

    A lock of the directory itself, so nothing is left behind. Where a file system knows no such
    locks, nothing is held.

    Raises:
        CheckpointError: a run is going on in it.
    """
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        other = ControlFile.read(directory)
        where = f" at {other.address}" if other is not None else ""
        raise CheckpointError(
            f"run {directory.name!r} is going on{where}; stop it first, or choose another run.name"
        ) from None
    except OSError:
        pass
    return held
