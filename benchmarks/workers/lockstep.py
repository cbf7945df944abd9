"""Worker: the two halves of a run with nothing between them, as the limit of a run under a bound.

Two processes exchange a byte for each trajectory and for each update. One rolls out and one trains,
each on a core and slots of its own. The first has a number of credits, and a finished update
returns one. There is no coordinator, no ledger and no weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from benchmarks.workers import bare_loops, halves

COMMITTED, SETTLED = b"c", b"s"
AT_ONCE = 4096
"""Bytes read at a time: more than the number of credits."""


def measure(config: Path, credit_count: int, warm_s: float, seconds: float) -> Values:
    """Return the trained steps/s with ``credit_count`` credits. A trajectory holds a credit until
    the learner has trained on it.
    """
    return child.run(
        "benchmarks.workers.lockstep",
        config,
        credit_count,
        warm_s,
        seconds,
        timeout_s=120.0 + 4.0 * (warm_s + seconds),
    ).answer


def roll(work: bare_loops.Work, link: socket.socket, credit_count: int) -> None:
    """Make a trajectory for each credit until the other end closes."""
    left = credit_count
    while True:
        if not left:
            left = len(link.recv(AT_ONCE))
            if not left:
                return
        left -= 1
        work()
        link.send(COMMITTED, socket.MSG_NOSIGNAL)


def train(work: bare_loops.Work, link: socket.socket, warm_s: float, seconds: float) -> float:
    """Train on each reported trajectory, and return samples/s over the window."""
    waiting, samples, before = 0, 0, 0
    began = time.perf_counter() + warm_s
    while (now := time.perf_counter()) < began + seconds:
        if now < began:
            before = samples
        waiting = (waiting or len(link.recv(AT_ONCE))) - 1
        samples += work()
        link.send(SETTLED)
    return (samples - before) / (time.perf_counter() - began)


def _pin(half: str) -> None:
    core = bare_loops.cores()[half]
    if core is not None:
        os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(1)


def main() -> None:
    """Arguments: ``CONFIG CREDITS WARM_S SECONDS``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("credits", type=int)
    parser.add_argument("warm_s", type=float)
    parser.add_argument("seconds", type=float)
    given = parser.parse_args()
    from tianflow.config.loading import load_config

    config = load_config(given.config)
    ours, theirs = socket.socketpair()
    actor = os.fork()  # before PyTorch starts threads
    if not actor:
        ours.close()
        _pin("actor")
        work = halves.actor(config)["slots"]
        # the learner has finished its window
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            roll(work, theirs, given.credits)
        os._exit(0)
    theirs.close()
    _pin("learner")
    learning = halves.learner(config)["slots"]
    found = train(learning, ours, given.warm_s, given.seconds)
    ours.close()
    os.waitpid(actor, 0)
    child.report({"trained_per_s": found})


if __name__ == "__main__":
    main()
