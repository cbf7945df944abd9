"""The end of a run: drain or drop, judge, save, and send every host home."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from tianflow.coordinator.checkpointing import CheckpointManager
from tianflow.coordinator.control import Control, LiveConfig
from tianflow.coordinator.evaluation import TargetTracker
from tianflow.coordinator.hosts import HostGroup
from tianflow.coordinator.lifecycle import Lifecycle
from tianflow.coordinator.supervisor import Supervisor
from tianflow.core.payloads import NO_VERSION
from tianflow.exchange.exchange import Exchange
from tianflow.ledger.tickets import State
from tianflow.logs import logger

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
