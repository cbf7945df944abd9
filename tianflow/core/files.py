"""Reading of files that another program, or another machine, may have made."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Open the regular file ``path`` for reading, or a link to one. Links are refused unless
    ``follow``.

    Anything else is refused at once: a FIFO would wait for ever, a device has no end.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    file = os.fdopen(os.open(path, flags), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "It is not a regular file", str(path))


def read_regular(path: Path, *, follow: bool = True, most: int | None = None) -> bytes:
    """The contents of the regular file ``path``. Raises OSError as `open_regular`, and for a file
    of more than ``most`` bytes.
    """
    with open_regular(path, follow=follow) as file:
        if most is None:
            return file.read()
        if len(data := file.read(most + 1)) > most:
            raise OSError(errno.EFBIG, f"It has more than {most} bytes", str(path))
        return data


@contextmanager
def opened_directory(path: Path) -> Iterator[Path]:
    """A path of the directory ``path`` that leads to it while the context is open, whatever takes
    its place.

    Raises:
        OSError: it is not a directory, or a link to one.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
