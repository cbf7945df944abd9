"""Short turns on a core, for threads that pass messages on and compute nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

TURN_NS = 100_000
"""The shortest that Linux takes."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
"""Number of the system call ``sched_setattr``, for which there is no function in Python or libc."""
_RESET_ON_FORK = 1
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def ask_for_short_turns() -> bool:
    """Ask that this thread has a core soon when it wakes up, and keeps it against one that it wakes. True if that was heard.

    What computes has turns of some milliseconds, and a message that has to wait for the end of one may be as long on its way as what
    it tells of took. The share of the core stays as it is. Threads and processes that are started from here have ordinary turns.
    Linux before 6.12 hears it and does nothing; whoever has chosen another policy or priority keeps it.
    """
    number = _SET_ATTRIBUTES.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice < 0:  # what is started from here would lose it
        return False
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, TURN_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, wanted, 0) == 0)
