"""Reading of files that another program, or another machine, may have made."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open the regular file ``path``, or a link to one, for reading.

    Anything else is refused at once: a FIFO would wait for ever, a device has no end.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "It is not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The contents of the regular file ``path``. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()
