"""Lifecycle, PeriodicTasks and Shutdown: the state of a run from "starting" to its end, what is due
from time to time, and the orderly end.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from tianflow.coordinator.evaluation import EvaluationSchedule
from tianflow.core.payloads import HEARTBEAT_S, NO_VERSION
from tianflow.core.statistics import HistogramBuilder
from tianflow.errors import RunError, StateConflictError
from tianflow.ledger.tickets import State
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.coordinator.checkpointing import CheckpointManager
    from tianflow.coordinator.control import LiveConfig
    from tianflow.coordinator.evaluation import TargetTracker
    from tianflow.coordinator.hosts import HostGroup
    from tianflow.coordinator.inbox import Inbox
    from tianflow.coordinator.supervisor import Supervisor
    from tianflow.exchange.exchange import Exchange

ENDED = ("done", "failed", "stopped")
TICK_S = 0.1
"""Seconds between two checks of due work, or of the conditions that an ending run waits for."""
STALE_TICK_S = 5.0
"""Seconds without a tick after which a run does not count as alive."""
EVALUATION = "evaluation"

log = logger("coordinator")


class Lifecycle:
    """The state of a run, why it ends, and the background work whose failure ends it.

    Args:
        before_s: seconds that the run had lasted before it was resumed.
        trained_before_s: those of them that count towards the limit.
    """

    def __init__(self, *, before_s: float, trained_before_s: float) -> None:
        self.state = "starting"
        """See `RunStatistics.state`."""
        self.ending = asyncio.Event()
        """Set once the run is to end."""
        self.end_state = "done"
        """The state of the run after its end."""
        self.end_reason = ""
        """Why the run ended; "" before."""
        self.hurried = False
        """A stop request has arrived while the run was already ending."""
        self.evaluation_deadline: float | None = None
        """`time.monotonic` at which the last evaluation of the run times out; None while no such
        evaluation runs.
        """
        self.first_error: RunError | None = None
        self.background: set[asyncio.Task[object]] = set()
        """Work beside the run."""
        self._before_s, self._trained_before_s = before_s, trained_before_s
        self._began = time.monotonic()
        self._training_began: float | None = None
        self._training_ended: float | None = None

    # Running
    # ----------------------------------------------------------------------------------------------

    def training_begins(self, state: str) -> None:
        """Learner and actors work for the first time: the run is in ``state``."""
        self.state = state
        self._training_began = time.monotonic()

    def require_active(self) -> None:
        """Raise StateConflictError if the run has ended or is ending."""
        if self.state in ENDED or self.state == "stopping" or self.ending.is_set():
            raise StateConflictError(
                f"the run is {self.state if self.state in ENDED else 'ending'}"
            )

    def run_in_background(self, work: Coroutine[None, None, object]) -> None:
        """Do ``work`` beside the run. An exception in it ends the run."""
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
        """End the run in ``state`` because of ``reason``; the first reason stays. A stop of an
        ending run hurries it.
        """
        if not self.ending.is_set():
            self.end_state, self.end_reason = state, reason
            self.ending.set()
        elif state == "stopped":
            self.hurried = True

    def fail(self, error: RunError) -> None:
        """The run cannot continue. The first error is shown."""
        if self.first_error is None:
            self.first_error = error
            log.error("the run failed", component=error.component, error=error.summary)
        if not self.ending.is_set() or self.state == "draining":
            self.end_state = "failed"
        self.end("failed", str(error))

    def cancel_drain(self) -> None:
        """A run that drains ends like one that was stopped, without waiting for open tickets."""
        if self.state == "draining":
            self.end_state = "stopped"

    @property
    def ends_at_once(self) -> bool:
        """True if the end does not wait for open tickets."""
        return self.end_state in ("failed", "stopped")

    def training_ends(self) -> None:
        """Training is over. The time of evaluation and checkpoint that follow does not count as
        training.
        """
        self.state = "stopping"
        self._training_ended = time.monotonic()

    def finish(self) -> None:
        """Every host has left."""
        self.state = self.end_state if self.first_error is None else "failed"

    def close(self) -> None:
        """Stop the clock of training, also where the run was cancelled."""
        if self._training_ended is None:
            self._training_ended = time.monotonic()

    # Time
    # ----------------------------------------------------------------------------------------------

    def elapsed_s(self, now: float) -> float:
        """Seconds that the run has lasted at ``now``, those before a resume included."""
        return self._before_s + now - self._began

    def trained_s(self, now: float) -> float:
        """Seconds that count towards the limit: while learner and actors worked, those before a
        resume included.
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
        """Seconds from the beginning of training to its end, or until now; None before it."""
        now = time.monotonic() if self._training_ended is None else self._training_ended
        return None if self._training_began is None else now - self._training_began


class PeriodicTasks:
    """Checks ten times a second what is due: limits of the run, checkpoints, evaluations.

    Args:
        lifecycle: of the run.
        live: its settings.
        checkpoints: writes them.
        target: evaluates.
        env_steps: steps so far.
        updates: updates so far.
        earlier_steps: steps before a resume.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        live: LiveConfig,
        checkpoints: CheckpointManager,
        target: TargetTracker,
        env_steps: Callable[[], int],
        updates: Callable[[], int],
        earlier_steps: int,
    ) -> None:
        self._lifecycle, self._live = lifecycle, live
        self._checkpoints, self._target = checkpoints, target
        self._env_steps, self._updates = env_steps, updates
        self.loop_lag = HistogramBuilder()
        """By how much the loop was late, in seconds, at every tick."""
        self.last_tick = time.monotonic()
        self._evaluations = EvaluationSchedule(now=self.last_tick, env_steps=earlier_steps)

    @property
    def alive(self) -> bool:
        """True while the last tick is young."""
        return time.monotonic() - self.last_tick < STALE_TICK_S

    async def run(self) -> None:
        """Tick until cancelled."""
        loop, lifecycle = asyncio.get_running_loop(), self._lifecycle
        next_save = time.monotonic() + self._live.config.checkpoint.every_s
        while True:
            asked = loop.time()
            await asyncio.sleep(TICK_S)
            self.loop_lag.add(max(0.0, loop.time() - asked - TICK_S))
            now = self.last_tick = time.monotonic()
            config = self._live.config
            self._check_limits(now)
            if now >= next_save and not config.run.deterministic:
                next_save = now + config.checkpoint.every_s
                if not self._checkpoints.busy:  # a checkpoint that waits for a slow learner will do
                    lifecycle.run_in_background(self._checkpoints.save())
            if not config.run.deterministic and self.evaluation_begins(now):
                lifecycle.run_in_background(self._target.evaluate())

    def evaluation_begins(self, now: float) -> bool:
        """True if an evaluation is due at ``now`` and may begin; the caller begins it."""
        # One at a time: the last evaluation of the run would have to wait for all others.
        idle = not self._target.busy and not self._lifecycle.ending.is_set()
        return (
            idle
            and self._lifecycle.state == "running"
            and self._evaluations.take(
                self._live.config.evaluation, now=now, env_steps=self._env_steps()
            )
        )

    def _check_limits(self, now: float) -> None:
        limits = self._live.config.run
        if limits.max_env_steps is not None and self._env_steps() >= limits.max_env_steps:
            self._lifecycle.end("done", "max_env_steps")
        elif limits.max_updates is not None and self._updates() >= limits.max_updates:
            self._lifecycle.end("done", "max_updates")
        elif (
            limits.max_seconds is not None and self._lifecycle.trained_s(now) >= limits.max_seconds
        ):
            self._lifecycle.end("done", "max_seconds")


class Shutdown:
    """The orderly end of a run: drain or drop, evaluate, save, stop the hosts.

    Args:
        lifecycle: of the run.
        live: its settings; they hold the learner.
        exchange: closed at the end.
        hosts: show whether the learner still reports.
        checkpoints: writes the last checkpoint.
        target: evaluates the last version.
        inbox: has the way to the learner.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        live: LiveConfig,
        exchange: Exchange,
        hosts: HostGroup,
        checkpoints: CheckpointManager,
        target: TargetTracker,
        inbox: Inbox,
    ) -> None:
        self._lifecycle, self._live, self._exchange = lifecycle, live, exchange
        self._hosts, self._checkpoints = hosts, checkpoints
        self._target, self._inbox = target, inbox

    async def run(self, supervisor: Supervisor) -> None:
        """Wait until every host has left."""
        lifecycle, exchange = self._lifecycle, self._exchange
        if lifecycle.state == "draining" and lifecycle.end_state != "failed":
            await self._while_the_learner_reports(self._drained(), "open trajectories")
        lifecycle.training_ends()
        exchange.hold_grants("ending")
        exchange.drop_open("stopped")
        exchange.close()
        if lifecycle.end_state != "failed":
            # A batch that the learner has pulled already would make an update that the last
            # checkpoint does not hold.
            self._live.hold_learner(for_good=True)
            # A run that ends by itself is evaluated at its last version. A run that was at its
            # limit before a learner began has no version.
            if lifecycle.end_state == "done" and exchange.ledger.version != NO_VERSION:
                await self._while_the_learner_reports(self._target.evaluate_last(), EVALUATION)
                for name in self._live.config.evaluation.further:
                    work = self._target.evaluate_last_further(name)
                    await self._while_the_learner_reports(work, EVALUATION)
            # A wait of its own: an evaluation whose episodes never end must not cost the
            # checkpoint.
            await self._while_the_learner_reports(self._checkpoints.save(), "checkpoint")
        await supervisor.stop()
        exchange.drop_open("stopped")
        lifecycle.finish()

    async def _while_the_learner_reports(
        self, work: Coroutine[None, None, object], what: str
    ) -> None:
        """Do ``work``, which waits for the learner; skip it when the learner is silent or it takes
        too long. A second stop request skips an evaluation, too.
        """
        task = asyncio.get_running_loop().create_task(work)
        config = self._live.config
        deadline = time.monotonic() + config.evaluation.timeout_s
        # A healthy learner is silent between two heartbeats.
        silence_s = max(config.run.grace_s, 3 * HEARTBEAT_S)
        if what == EVALUATION:
            self._lifecycle.evaluation_deadline = deadline
        try:
            while not task.done():
                late = time.monotonic() > deadline
                silent = self._hosts.learner_silent_for > silence_s
                if late or silent or (self._lifecycle.hurried and what == EVALUATION):
                    reason = (
                        "the learner is silent"
                        if silent
                        else "it takes too long"
                        if late
                        else "a stop was requested"
                    )
                    log.warning("the end of the run skips a step", skipped=what, reason=reason)
                    return
                await asyncio.wait({task}, timeout=TICK_S)
            task.result()
        finally:
            self._lifecycle.evaluation_deadline = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _drained(self) -> None:
        """Wait until the begun trajectories are trained on, as far as they fill batches."""
        ledger = self._exchange.ledger
        while self._inbox.learner is not None and not self._lifecycle.ends_at_once:
            open_ = len(ledger.live(State.GRANTED, State.BEGUN, State.TAKEN))
            if not open_ and len(ledger.live(State.COMMITTED)) < ledger.limits.batch:
                return
            await asyncio.sleep(TICK_S)
