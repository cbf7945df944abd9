"""time -> PeriodicTasks -> limits that end the run, checkpoints and evaluations that are due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tianflow.coordinator.checkpointing import CheckpointManager
from tianflow.coordinator.control import LiveConfig
from tianflow.coordinator.evaluation import TargetTracker
from tianflow.coordinator.lifecycle import Lifecycle
from tianflow.core.statistics import HistogramBuilder

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
