"""How a run goes, from "starting" to its end, and the work in the background whose failure is the
run's.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Coroutine

from tianflow.errors import RunError, StateConflictError
from tianflow.logs import logger

ENDED = ("done", "failed", "stopped")

log = logger("coordinator")


class Lifecycle:
    """The state of a run, and why it ends.

    Args:
        before_s: seconds that the run had lived before it was resumed.
        trained_before_s: those of them that count towards the limit.
    """

    def __init__(self, *, before_s: float, trained_before_s: float) -> None:
        self.state = "starting"
        """See `RunStatistics.state`."""
        self.ending = asyncio.Event()
        """Set once the run is to end."""
        self.end_state = "done"
        """What the run will be when it has ended."""
        self.end_reason = ""
        """Why the run ended; "" while it goes on."""
        self.hurried = False
        """Somebody wants it to end who came when it was ending already."""
        self.evaluates_until: float | None = None
        """`time.monotonic` when the last evaluation of the run is given up; None while there is
        none.
        """
        self.first_error: RunError | None = None
        self.background: set[asyncio.Task[object]] = set()
        """Work that goes on beside the run."""
        self._before_s, self._trained_before_s = before_s, trained_before_s
        self._began = time.monotonic()
        self._training_began: float | None = None
        self._training_ended: float | None = None

    # Going on
    # ----------------------------------------------------------------------------------------------

    def training_begins(self, state: str) -> None:
        """Learner and actors are first at work: the run is in ``state``, running or paused."""
        self.state = state
        self._training_began = time.monotonic()

    def require_going(self) -> None:
        """Raise StateConflictError if the run has ended or is ending."""
        if self.state in ENDED or self.state == "stopping" or self.ending.is_set():
            raise StateConflictError(
                f"the run is {self.state if self.state in ENDED else 'ending'}"
            )

    def go_on_with(self, work: Coroutine[None, None, object]) -> None:
        """Do ``work`` beside the run. What it raises ends the run."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[object]) -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            details = "".join(traceback.format_exception(error))
            self.fail(RunError("coordinator", f"{type(error).__name__}: {error}", details))

    # Ending
    # ----------------------------------------------------------------------------------------------

    def end(self, state: str, reason: str) -> None:
        """The run is to end in ``state`` because of ``reason``; the first reason stays. Whoever
        stops one that is ending hurries it.
        """
        if not self.ending.is_set():
            self.end_state, self.end_reason = state, reason
            self.ending.set()
        elif state == "stopped":
            self.hurried = True

    def fail(self, error: RunError) -> None:
        """The run cannot go on. The first error is the one that is shown last."""
        if self.first_error is None:
            self.first_error = error
            log.error("the run failed", component=error.component, error=error.summary)
        if not self.ending.is_set() or self.state == "draining":
            self.end_state = "failed"
        self.end("failed", str(error))

    def drop_the_drain(self) -> None:
        """A drain is not waited for any longer: the run ends as one that was stopped."""
        if self.state == "draining":
            self.end_state = "stopped"

    @property
    def ends_at_once(self) -> bool:
        """True if what is open is waited for no longer."""
        return self.end_state in ("failed", "stopped")

    def training_ends(self) -> None:
        """Nothing is begun or trained on any more; the last things follow, and their time does not
        count as training.
        """
        self.state = "stopping"
        self._training_ended = time.monotonic()

    def ended(self) -> None:
        """Everybody was sent home."""
        self.state = self.end_state if self.first_error is None else "failed"

    def over(self) -> None:
        """Nothing follows, not even if training was cut off."""
        if self._training_ended is None:
            self._training_ended = time.monotonic()

    # Time
    # ----------------------------------------------------------------------------------------------

    def elapsed_s(self, now: float) -> float:
        """Seconds of life up to ``now``, those before a resume included."""
        return self._before_s + now - self._began

    def trained_s(self, now: float) -> float:
        """Seconds that count towards the limit: while learner and actors were at work, before a
        resume, too.
        """
        if self._training_began is None:
            return self._trained_before_s
        return (
            self._trained_before_s
            + (now if self._training_ended is None else self._training_ended)
            - self._training_began
        )

    @property
    def training_s(self) -> float | None:
        """Seconds since learner and actors were first at work, up to the end of training; None
        before.
        """
        now = time.monotonic() if self._training_ended is None else self._training_ended
        return None if self._training_began is None else now - self._training_began
