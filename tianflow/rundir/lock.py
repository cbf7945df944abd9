"""A lock on a run's directory: one process at a time writes to it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tianflow.errors import CheckpointError
from tianflow.rundir.control_file import ControlFile


def lock_directory(directory: Path) -> int:
    """Lock the existing ``directory`` until the returned descriptor is closed, or this process
    ends.

    The lock is on the directory itself, so no lock file remains. A file system without such locks
    locks nothing.

    Raises:
        CheckpointError: a run is active in it, or it was replaced during the call.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        other = ControlFile.read(directory)
        where = f" at {other.address}" if other is not None else ""
        raise CheckpointError(
            f"run {directory.name!r} is active{where}; stop it first, or choose another run.name"
        ) from None
    except OSError:
        pass
    try:
        replaced = not os.path.samestat(os.fstat(descriptor), directory.stat())
    except FileNotFoundError:
        replaced = True
    if replaced:
        os.close(descriptor)
        raise CheckpointError(f"{str(directory)!r} was moved or deleted by another process; retry")
    return descriptor
