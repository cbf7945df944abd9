"""grants, weights, settings -> Actor -> trajectories, episode counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tianflow.components.turns import Turns, Wait
from tianflow.core.events import EnvironmentFailed
from tianflow.core.learning import LearningTally
from tianflow.core.payloads import Grant, Trajectory, Version
from tianflow.core.statistics import (
    ActorMeasures,
    ComponentStatistics,
    HistogramBuilder,
    StateClock,
)
from tianflow.envs.progress import EnvironmentProgress
from tianflow.errors import EndOfChannel, EnvironmentFailedError, PoisonedTrajectoryError, RunError

if TYPE_CHECKING:
    from tianflow.components.rollout import Rollout, RolloutResult
    from tianflow.core.payloads import Activity
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import EventPublisher, SettingsReader, TrajectorySender


class Actor:
    """Steps a vector environment with the newest policy, and fills one trajectory per grant.

    Consumes: grants, weights, settings. Produces: trajectories, episodes.
    Waits: for a grant; for its turn on the compute thread. Unblocked by: a credit and a slot; the
    end of another actor's turn.

    Args:
        name: name of the component, e.g. ``"actor-3"``.
        host: name of its host process.
        sender: end of the channel of grants and trajectories.
        settings: live settings.
        events: publisher of failure events.
        compute: compute thread of the host.
        make_rollout: builds environments and policy, on the compute thread.
        progress: follows the environments of the rollout.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        sender: TrajectorySender,
        settings: SettingsReader,
        events: EventPublisher,
        compute: Compute,
        make_rollout: Callable[[], Rollout],
        progress: EnvironmentProgress | None = None,
    ) -> None:
        self._progress = progress or EnvironmentProgress()
        self._progress.on_wait = self._inference_waits
        self.name = name
        self._host, self._sender, self._settings, self._events = host, sender, settings, events
        self._compute, self._make_rollout = compute, make_rollout
        self._clock = StateClock()
        self._counters = {"trajectories": 0.0, "env_failures": 0.0, "poisoned": 0.0}
        self._learning = LearningTally(group="rollout", source=name)
        self._seconds, self._stepping = HistogramBuilder(), HistogramBuilder()
        self._failures: deque[float] = deque()
        self._loop = asyncio.get_running_loop()
        self._rollout: Rollout | None = None
        self._retired = False
        self._rebuilding = self._rolling = False
        self._in_progress = 0

    async def run(self, started: Callable[[], None]) -> None:
        """Run until cancelled, or until the run accepts no more trajectories."""
        rollout = self._rollout = await self._compute.run(self._make_rollout)
        started()
        unsubscribe = self._settings.on_change(self._update_idle_state)
        try:
            async with asyncio.TaskGroup() as fills:
                await self._fill_slots(rollout, fills)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            unsubscribe()
        self._clock.enter("ended")
        await self._compute.run(rollout.close)

    async def _fill_slots(self, rollout: Rollout, fills: asyncio.TaskGroup) -> None:
        """Fill one trajectory after the other.

        With enough credits, the next trajectory already waits for the compute thread.
        """
        running: deque[asyncio.Event] = deque()
        with contextlib.suppress(EndOfChannel):
            while not self._retired:
                self._update_idle_state()
                grant = await self._sender.acquire()
                self._in_progress += 1
                if self._in_progress == 1:
                    self._clock.enter("waiting:turn")
                running.append(asyncio.Event())
                fills.create_task(self._fill(rollout, grant, running[-1]))
                while len(running) > min(1, grant.ahead):
                    await running[0].wait()
                    running.popleft()

    def statistics(self) -> ComponentStatistics:
        """Times and counters."""
        return ComponentStatistics(
            name=self.name,
            role="actor",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.value.generation,
            learning=self._learning.read(),
        ).with_measures(
            ActorMeasures(
                **self._counters,
                refused_metrics=float(self._learning.refused),
                rollout_seconds=self._seconds.read(),
                trajectory_seconds=self._stepping.read(),
            )
        )

    @property
    def activity(self) -> Activity | None:
        """What the compute thread does with the environments of this actor."""
        return self._progress.activity(self.name)

    def retire(self) -> None:
        """End. The trajectory in progress is aborted, and no further grant is requested."""
        self._retired = True
        self._sender.close()
        if self._rollout is not None:
            self._rollout.stop()
            self._compute.wake()

    async def _fill(self, rollout: Rollout, grant: Grant, finished: asyncio.Event) -> None:
        """Fill one trajectory: wait for the compute thread, roll out, send the result.

        ``finished`` is set when the next trajectory may begin.
        """
        first = ended = 0.0

        def begun(version: Version) -> None:
            nonlocal first
            first = time.monotonic()
            self._clock.enter("busy")
            self._loop.call_soon_threadsafe(self._sender.begin, grant, version)

        def roll() -> Turns[RolloutResult | None]:
            nonlocal ended
            if self._rolling:  # the trajectory before waits for an inference server
                yield Wait(lambda: not self._rolling)
            # Calls that were queued behind a failure or behind the end do nothing.
            if self._rebuilding or self._retired:
                return None
            self._rolling = True
            try:
                result = yield from rollout.turns(view, grant, minimum, begun)
            except (EnvironmentFailedError, PoisonedTrajectoryError):
                # Set on the thread: a queued trajectory must not begin before the back-off.
                self._rebuilding = True
                raise
            finally:
                self._rolling = False
            ended = time.monotonic()
            return result

        view = self._sender.view(grant)
        config = self._settings.value.config
        minimum, steps = config.balance.min_fragment_steps, config.actors.rollout_steps
        began = time.monotonic()
        try:
            result = await self._compute.run(roll)
        except (EnvironmentFailedError, PoisonedTrajectoryError) as error:
            self._sender.abort(grant, _reason(error))
            await self._rebuild(rollout, error)
            self._rebuilding = False
            finished.set()
        else:
            # before the commit, so that the next request leaves in the same packet
            finished.set()
            self._seconds.add(time.monotonic() - began)
            if result is not None and result.length:
                # A cut trajectory counts with the time that it would have taken at full length.
                self._stepping.add((ended - first) * steps / result.length)
            self._commit(grant, result)
        self._in_progress -= 1
        self._update_idle_state()

    def _commit(self, grant: Grant, result: RolloutResult | None) -> None:
        if result is None or result.length == 0:
            self._sender.abort(grant, "stopped")
            return
        trajectory = Trajectory(
            grant.ticket, grant.slot, result.length, result.env_steps, result.version
        )
        self._sender.commit(trajectory, result.episodes)
        self._counters["trajectories"] += 1
        for metrics in result.metrics:
            self._learning.add(self._learning.accept(metrics))

    def _inference_waits(self, waiting: bool) -> None:
        """The trajectory in progress waits for an inference server, or no longer. On the compute
        thread.
        """
        self._clock.enter("waiting:inference" if waiting else "busy")

    async def _rebuild(
        self, rollout: Rollout, error: EnvironmentFailedError | PoisonedTrajectoryError
    ) -> None:
        """Create the environments again, until it succeeds or the number of failures ends the
        run.
        """
        failure: EnvironmentFailedError | PoisonedTrajectoryError | None = error
        while failure is not None:
            self._count(failure)
            self._clock.enter("rebuilding")
            # Without the back-off, an immediate failure would flood the log.
            await asyncio.sleep(min(2.0, 0.01 * 2 ** len(self._failures)))
            try:
                await self._compute.run(rollout.rebuild)
            except (EnvironmentFailedError, PoisonedTrajectoryError) as again:
                failure = again
            else:
                failure = None

    def _count(self, error: EnvironmentFailedError | PoisonedTrajectoryError) -> None:
        """Count and publish a failure.

        Raises:
            RunError: the number of failures exceeds ``env.max_failures``.
        """
        reason = _reason(error)
        self._counters["env_failures"] += 1
        self._counters["poisoned"] += reason == "poisoned"
        self._events.publish(EnvironmentFailed(self.name, reason, str(error)))
        env = self._settings.value.config.env
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - env.failure_window_s:
            self._failures.popleft()
        if len(self._failures) > env.max_failures:
            details = error.details if isinstance(error, EnvironmentFailedError) else ""
            often = (
                f"the environment failed {len(self._failures)} times in {env.failure_window_s:g} s"
            )
            raise RunError(
                self.name, f"{often} (env.max_failures = {env.max_failures}): {error}", details
            )

    def _update_idle_state(self) -> None:
        if self._in_progress == 0:
            self._clock.enter("paused" if self._settings.value.paused else "waiting:grant")


def _reason(error: EnvironmentFailedError | PoisonedTrajectoryError) -> str:
    """Reason with which a ticket is dropped."""
    return "env_error" if isinstance(error, EnvironmentFailedError) else "poisoned"
