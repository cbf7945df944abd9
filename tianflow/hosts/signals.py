"""Signals of a host process."""

from __future__ import annotations

import os
import signal
from types import FrameType


def outlive_sigterm() -> None:
    """Ignore SIGTERM in this process from now on.

    A batch system sends it to every process of a job, and the hosts of a run that stops still have
    work to do: a last checkpoint, and what actors have. The coordinator ends its hosts, and SIGKILL
    does. Processes that an environment starts end at SIGTERM as ever.
    """
    own = os.getpid()

    def ignore(_number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:  # a fork inherits this function; a new program would not
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, ignore)
