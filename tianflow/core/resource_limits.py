"""Sentences about what the system refuses: which limit, what needed more, and what to raise."""

from __future__ import annotations

import errno
import resource

_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "open files", "ulimit -n", 1),
    errno.EFBIG: (resource.RLIMIT_FSIZE, "bytes in a file", "ulimit -f", 1024),
    errno.ENOMEM: (resource.RLIMIT_AS, "bytes of address space", "ulimit -v", 1024),
    errno.EAGAIN: (resource.RLIMIT_NPROC, "processes and threads", "ulimit -u", 1),
}
"""By error number: the limit, its unit in words, the shell's command, and units in one of its."""


MOST_OPEN_FILES = 16_384
"""Open files that a process permits itself at most. Each connection costs memory, too."""


def permit_open_files() -> None:
    """Permit this process as many open files as the system allows it, at most `MOST_OPEN_FILES`:
    shells permit 1,024, and connections of strangers would use them up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def refusal(error: OSError, needed: str, *, nbytes: int | None = None) -> str:
    """One sentence for ``error``.

    Args:
        error: from the system.
        needed: what was refused, with its size.
        nbytes: size of that, in bytes.
    """
    said = f"{needed}: {error.strerror or error}"
    limit, units, command, factor = _LIMITS.get(error.errno or 0, (None, "", "", 1))
    if limit is None:
        return said
    soft, _ = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY:
        return said
    enough = "" if nbytes is None else f" to at least {-(-nbytes // factor)}"
    return f"{said}: the limit is {soft} {units}; raise it{enough} (`{command}`)"
