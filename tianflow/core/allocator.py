"""The C library's allocator in processes that free large blocks again and again.

Memory that an update, a step or a message frees, up to 256 MB, stays with the process. The next one
would otherwise pay for every page again. One arena, because the arenas of other threads return
blocks of more than 64 MB at once.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD, TRIM_THRESHOLD, ARENAS = 32 << 20, 256 << 20, 1
RETAINED_MEMORY = {
    "MALLOC_ARENA_MAX": str(ARENAS),
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD),
}
"""Environment variables with which a process begins so. For glibc."""
_OPTIONS = {-8: ARENAS, -3: MMAP_THRESHOLD, -1: TRIM_THRESHOLD}
"""By the option of ``mallopt``: M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h."""


def retain_memory() -> None:
    """Let this process do so from now on. Another C library than glibc ignores it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _OPTIONS.items():
            mallopt(option, value)
