"""A small disk for the directory of runs, which fills and empties on request."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from benchmarks.lib.storm.clock import UnavailableError

CLONE_NEWNS = 0x00020000
MS_NOSUID, MS_NODEV = 2, 4
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
CHUNK = 1 << 20
FILLER = ".filler"
SHARED_MEMORY = Path("/dev/shm")

_libc = ctypes.CDLL(None, use_errno=True)


def enter_private_mounts() -> None:
    """Give this process, and the processes that it starts, mounts of their own. They vanish with
    the last of these processes. Call it before any thread starts.

    Raises:
        UnavailableError: the system refuses, because this process is not root.
    """
    _call("unshare", ctypes.c_int(CLONE_NEWNS))
    _call("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)


def mount_memory(path: Path, *, mib: int) -> None:
    """Mount an empty file system of ``mib`` MiB at ``path``. Raises as `enter_private_mounts`
    does.
    """
    path.mkdir(parents=True, exist_ok=True)
    options = f"size={mib}m,mode=0755".encode()
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    _call("mount", b"storm", os.fsencode(path), b"tmpfs", flags, options)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise UnavailableError(f"{name} failed: {reason}; a small disk needs root")


class SmallDisk:
    """A file system that a filler can fill to the last byte. Use as a context: it is empty of
    filler afterwards.

    Args:
        path: a directory on the file system.
    """

    def __init__(self, path: Path) -> None:
        self._filler = path / FILLER

    def fill(self) -> None:
        """Use up all space. Repeat it to use up what was freed meanwhile."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while True:  # the last write that succeeds is a short one
                os.write(descriptor, bytes(CHUNK))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        """Remove the filler."""
        with contextlib.suppress(FileNotFoundError):
            self._filler.unlink()
