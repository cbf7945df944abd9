"""How a run goes, from "starting" to its end, and the work in the background whose failure is the
run's.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from tianflow.core.payloads import NO_VERSION
from tianflow.core.statistics import HistogramBuilder
from tianflow.errors import RunError, StateConflictError
from tianflow.ledger.tickets import State
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.coordinator.checkpointing import CheckpointManager
    from tianflow.coordinator.control import Control, LiveConfig
    from tianflow.coordinator.evaluation import TargetTracker
    from tianflow.coordinator.hosts import HostGroup
    from tianflow.coordinator.supervisor import Supervisor
    from tianflow.exchange.exchange import Exchange

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


TICK_S = 0.1
STALE_TICK_S = 5.0


class PeriodicTasks:
    """Looks ten times a second whether something is due.

    Args:
        life: of the run.
        in_force: its settings.
        keeper: writes checkpoints.
        goal: has evaluations made.
        env_steps: steps so far.
        updates: so far.
    """

    def __init__(
        self,
        *,
        life: Lifecycle,
        in_force: LiveConfig,
        keeper: CheckpointManager,
        goal: TargetTracker,
        env_steps: Callable[[], int],
        updates: Callable[[], int],
    ) -> None:
        self._life, self._in_force, self._keeper, self._goal = life, in_force, keeper, goal
        self._env_steps, self._updates = env_steps, updates
        self.loop_lag = HistogramBuilder()
        """By how much the loop was late, in seconds, at every tick."""
        self.last_tick = time.monotonic()

    @property
    def alive(self) -> bool:
        """True while the last tick is young."""
        return time.monotonic() - self.last_tick < STALE_TICK_S

    async def run(self) -> None:
        """Tick until cancelled."""
        loop, life = asyncio.get_running_loop(), self._life
        next_save = next_evaluation = time.monotonic()
        next_save += self._in_force.config.checkpoint.every_s
        while True:
            asked = loop.time()
            await asyncio.sleep(TICK_S)
            self.loop_lag.add(max(0.0, loop.time() - asked - TICK_S))
            now = self.last_tick = time.monotonic()
            config = self._in_force.config
            self._check_limits(now)
            if now >= next_save and not config.run.deterministic:
                next_save = now + config.checkpoint.every_s
                if not self._keeper.busy:  # one that waits for a slow learner will do
                    life.go_on_with(self._keeper.save())
            every = config.evaluation.every_s
            idle = (
                not self._goal.busy and not life.ending.is_set()
            )  # one behind the other, the last of the run would wait for all
            if every is not None and now >= next_evaluation and idle and life.state == "running":
                next_evaluation = now + every
                life.go_on_with(self._goal.evaluate())

    def _check_limits(self, now: float) -> None:
        limits = self._in_force.config.run
        if limits.max_env_steps is not None and self._env_steps() >= limits.max_env_steps:
            self._life.end("done", "max_env_steps")
        elif limits.max_updates is not None and self._updates() >= limits.max_updates:
            self._life.end("done", "max_updates")
        elif limits.max_seconds is not None and self._life.trained_s(now) >= limits.max_seconds:
            self._life.end("done", "max_seconds")


TICK_S = 0.1
EVALUATION = "evaluation"

log = logger("coordinator")


class Shutdown:
    """The last things of a run.

    Args:
        life: of the run.
        in_force: its settings.
        exchange: closed in the end.
        control: holds the learner.
        staff: whether the learner still speaks.
        keeper: writes the last checkpoint.
        goal: has the last version judged.
        has_learner: whether there is a way to the learner.
    """

    def __init__(
        self,
        *,
        life: Lifecycle,
        in_force: LiveConfig,
        exchange: Exchange,
        control: Control,
        staff: HostGroup,
        keeper: CheckpointManager,
        goal: TargetTracker,
        has_learner: Callable[[], bool],
    ) -> None:
        self._life, self._in_force, self._exchange, self._control = (
            life,
            in_force,
            exchange,
            control,
        )
        self._staff, self._keeper, self._goal, self._has_learner = staff, keeper, goal, has_learner

    async def wind_down(self, supervisor: Supervisor) -> None:
        """Drain or drop, save, judge, and send every host home."""
        life, exchange = self._life, self._exchange
        if life.state == "draining" and life.end_state != "failed":
            await self._while_the_learner_answers(self._drained(), "what was begun")
        life.training_ends()
        exchange.hold_grants("ending")
        exchange.drop_open("stopped")
        exchange.close()
        if life.end_state != "failed":
            self._control.hold_learner(
                True
            )  # what it has pulled ahead would be an update more than the last checkpoint holds
            # by itself: it is judged at the version it ended with; one that was at its limit before
            # a learner began has none to judge
            if life.end_state == "done" and exchange.ledger.version != NO_VERSION:
                await self._while_the_learner_answers(self._goal.evaluate_last(), EVALUATION)
            # apart: an evaluation that takes all its time, of episodes that never end, say, must
            # not cost the checkpoint
            await self._while_the_learner_answers(self._keeper.save(), "checkpoint")
        await supervisor.stop()
        exchange.drop_open("stopped")
        life.ended()

    async def _while_the_learner_answers(
        self, work: Coroutine[None, None, object], what: str
    ) -> None:
        """Do ``work``, which waits for the learner, but let a learner that has been stopped not
        keep the run from ending.

        An evaluation is given up, too, when somebody wants the run to end at last.
        """
        task = asyncio.get_running_loop().create_task(work)
        config = self._in_force.config
        deadline = time.monotonic() + config.evaluation.timeout_s
        if what == EVALUATION:
            self._life.evaluates_until = deadline
        try:
            while not task.done():
                late = time.monotonic() > deadline
                silent = self._staff.learner_silent_for > config.run.grace_s
                if late or silent or (self._life.hurried and what == EVALUATION):
                    reason = (
                        "the learner is silent"
                        if silent
                        else "it takes too long"
                        if late
                        else "somebody stopped it"
                    )
                    log.warning("the run ends without its last things", missing=what, reason=reason)
                    return
                await asyncio.wait({task}, timeout=TICK_S)
            task.result()
        finally:
            self._life.evaluates_until = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _drained(self) -> None:
        """Until what was begun is trained on, as far as it fills batches."""
        ledger = self._exchange.ledger
        while self._has_learner() and not self._life.ends_at_once:
            open_ = len(ledger.live(State.GRANTED, State.BEGUN, State.TAKEN))
            if not open_ and len(ledger.live(State.COMMITTED)) < ledger.limits.batch:
                return
            await asyncio.sleep(TICK_S)
