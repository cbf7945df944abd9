"""Turns of a process that makes updates: it answers each line of its input with a rate.

Peers run in environments of their own, so this module needs only the standard library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


def answer_turns(
    updates: Callable[[], int], *, wait: Callable[[], object] = lambda: None, warm: int = 3
) -> None:
    """Answer each line, a number of seconds, with updates per second and ms of CPU time an update.

    Args:
        updates: makes some updates, and returns their number.
        wait: returns when a GPU has computed all of them.
        warm: number of calls before the first turn.
    """
    for _ in range(warm):
        updates()
    wait()
    answer({"ready": True})
    for line in sys.stdin:
        seconds, count = float(line), 0
        began, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            count += updates()
        wait()
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        answer({"updates_per_s": count / wall, "cpu_ms": 1000.0 * used / count})


def answer(values: dict[str, object]) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
