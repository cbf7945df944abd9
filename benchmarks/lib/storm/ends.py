"""Ends of a coordinator's life: how they come about, and how they are judged."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from benchmarks.lib.live_run import FORK_SERVER, LiveRun
from benchmarks.lib.storm.disk import SmallDisk
from benchmarks.lib.storm.judges import Findings
from benchmarks.lib.storm.plan import ACTORS

END_S = 120.0
"""Longest time from a signal to the end of a coordinator, on a loaded machine."""
LEFT_S = 10.0
"""Time in which everything of an ended run must be gone."""
INTERRUPTED, LOST = 130, 1
"""Exit codes of a run that was interrupted, and of one that could not save its last updates."""


@dataclass(frozen=True, slots=True)
class End:
    """One way in which a life ends.

    Attributes:
        name: for messages.
        by: what ends it: SIGKILL, SIGINT, or a request to drain.
        stopped: role of which one process is stopped before.
        disk: the disk is full then, or was full shortly before.
        amid: a kill strikes amid the faults of a round.
    """

    name: str
    by: Literal["kill", "interrupt", "drain"]
    stopped: str = ""
    disk: Literal["", "full", "was full"] = ""
    amid: bool = False

    @property
    def expected(self) -> int:
        """The exit code."""
        if self.by == "kill":
            return -signal.SIGKILL
        if self.disk == "full":
            return LOST
        return INTERRUPTED if self.by == "interrupt" else 0


INTERRUPT = End("interrupt", "interrupt")
ENDS = (
    INTERRUPT,
    End("drain", "drain"),
    End("kill", "kill"),
    End("kill amid faults", "kill", amid=True),
    End("kill after a full disk", "kill", disk="was full"),
    End("kill beside a stopped fork server", "kill", stopped=FORK_SERVER),
    End("kill beside a stopped learner", "kill", stopped="learner"),
    End("interrupt on a full disk", "interrupt", disk="full"),
    End("interrupt beside a stopped fork server", "interrupt", stopped=FORK_SERVER),
    End("interrupt beside a stopped actor host", "interrupt", stopped=ACTORS),
    End("drain beside a stopped actor host", "drain", stopped=ACTORS),
)


def carry_out(end: End, live: LiveRun, disk: SmallDisk | None) -> None:
    """Bring the end about. It may take a while to come."""
    if end.disk == "full" and disk is not None:
        disk.fill()
    victims = [process for process in live.table() if process.role.startswith(end.stopped)]
    if end.stopped and victims:
        with suppress(ProcessLookupError):
            os.kill(victims[0].pid, signal.SIGSTOP)
    if end.by == "interrupt":
        live.process.send_signal(signal.SIGINT)
    elif end.by == "drain":
        live.request(live.resource("drain"), "POST")
    else:
        live.process.kill()


def judge(end: End, live: LiveRun, findings: Findings) -> float:
    """Wait for the end, and judge exit code, summary, and what is left. Return the seconds of
    waiting.
    """
    began = time.monotonic()
    try:
        code = live.wait(END_S)
    except TimeoutError as error:
        findings.report("end", end.name, str(error), live.stderr[-4000:])
        return time.monotonic() - began
    took = time.monotonic() - began
    if code != end.expected:
        detail = f"exit code {code}, not {end.expected}"
        findings.report("end", end.name, detail, live.stderr[-4000:])
    if end.by != "kill":
        _judge_summary(end, live, findings)
    left = live.leftovers(LEFT_S)
    if left:
        findings.report("left", end.name, "; ".join(left), live.stderr[-4000:])
    return took


def _judge_summary(end: End, live: LiveRun, findings: Findings) -> None:
    summary = live.summary
    saved, updates = summary.get("checkpoint"), summary.get("updates")
    if end.expected != LOST and saved != updates:
        detail = f"{saved} of {updates} updates saved"
        findings.report("end", f"{end.name}, checkpoint", detail, live.stderr[-4000:])
    open_ = summary.get("trajectories", {}).get("open")
    if open_ != 0:
        findings.report("end", f"{end.name}, open trajectories", str(open_))
    staged = [path.name for path in (live.directory / "checkpoints").glob(".tmp-*")]
    if staged:
        findings.report("left", f"{end.name}, staged checkpoints", ", ".join(staged))
