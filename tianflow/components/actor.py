"""grants, weights, settings -> Actor -> trajectories, episode counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tianflow.core.events import EnvironmentFailed
from tianflow.core.payloads import Grant, Trajectory, Version
from tianflow.core.statistics import ComponentStatistics, HistogramBuilder, StateClock
from tianflow.errors import EndOfChannel, EnvironmentFailedError, PoisonedTrajectoryError, RunError

if TYPE_CHECKING:
    from tianflow.components.rollout import Rollout, RolloutResult
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import EventPublisher, SettingsReader, TrajectorySender


class Actor:
    """Steps a vector of environments with the newest policy and fills one trajectory a grant.

    Consumes: grants, weights, settings. Produces: trajectories, episodes.
    Waits: for a grant; for its turn on the compute thread. Unblocked by: a credit and a slot; the
    end of another actor's turn.

    Args:
        name: its place, e.g. ``"actor-3"``.
        host: the process it lives in.
        sender: its end of grants and trajectories.
        settings: live settings.
        events: where failures are told.
        compute: the host's compute thread.
        make_rollout: builds environments and policy, on the compute thread.
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
    ) -> None:
        self.name = name
        self._host, self._sender, self._settings, self._events = host, sender, settings, events
        self._compute, self._make_rollout = compute, make_rollout
        self._clock = StateClock()
        self._counters = {"trajectories": 0.0, "env_failures": 0.0, "poisoned": 0.0}
        self._seconds, self._stepping = HistogramBuilder(), HistogramBuilder()
        self._failures: deque[float] = deque()
        self._loop = asyncio.get_running_loop()
        self._rollout: Rollout | None = None
        self._retired = False
        self._mending = False
        self._in_hand = 0

    async def run(self, started: Callable[[], None]) -> None:
        """Until cancelled, or the run wants no more trajectories."""
        rollout = self._rollout = await self._compute.run(self._make_rollout)
        started()
        forget = self._settings.on_change(self._rest_or_wait)
        try:
            async with asyncio.TaskGroup() as fills:
                await self._keep_filling(rollout, fills)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            forget()
        self._clock.enter("ended")
        await self._compute.run(rollout.close)

    async def _keep_filling(self, rollout: Rollout, fills: asyncio.TaskGroup) -> None:
        """One trajectory after the other. Where credits are plenty the next one waits on the
        compute thread already.
        """
        running: deque[asyncio.Event] = deque()
        with contextlib.suppress(EndOfChannel):
            while not self._retired:
                self._rest_or_wait()
                grant = await self._sender.acquire()
                self._in_hand += 1
                if self._in_hand == 1:
                    self._clock.enter("waiting:turn")
                running.append(asyncio.Event())
                fills.create_task(self._fill(rollout, grant, running[-1]))
                while len(running) > min(1, grant.ahead):
                    await running[0].wait()
                    running.popleft()

    def statistics(self) -> ComponentStatistics:
        """Where its time goes, and how many trajectories it has made."""
        return ComponentStatistics(
            name=self.name,
            role="actor",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.key,
            counters=dict(self._counters),
            distributions={
                "rollout_seconds": self._seconds.read(),
                "trajectory_seconds": self._stepping.read(),
            },
        )

    def retire(self) -> None:
        """End: the trajectory now rolling out is given back, and no other is asked for."""
        self._retired = True
        self._sender.close()
        if self._rollout is not None:
            self._rollout.stop()

    async def _fill(self, rollout: Rollout, grant: Grant, over: asyncio.Event) -> None:
        """One trajectory, from its turn on the compute thread to where it goes; ``over`` says that
        it is no longer in hand.
        """
        first = ended = 0.0

        def begun(version: Version) -> None:
            nonlocal first
            first = time.monotonic()
            self._loop.call_soon_threadsafe(self._begun, grant, version)

        def roll() -> RolloutResult | None:
            nonlocal ended
            if (
                self._mending or self._retired
            ):  # what is in line behind a failure, or behind the last one
                return None
            try:
                result = rollout.run(view, grant, minimum, begun)
            except (EnvironmentFailedError, PoisonedTrajectoryError):
                # here, on the thread: a trajectory already in line must not begin before the
                # back-off
                self._mending = True
                raise
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
            self._mending = False
            over.set()
        else:
            # before the commit, so that what is asked for next leaves in one packet with it
            over.set()
            self._seconds.add(time.monotonic() - began)
            if result is not None and result.length:
                # Of one that was cut: what it would have taken whole.
                self._stepping.add((ended - first) * steps / result.length)
            self._commit(grant, result)
        self._in_hand -= 1
        self._rest_or_wait()

    def _commit(self, grant: Grant, result: RolloutResult | None) -> None:
        if result is None or result.length == 0:
            self._sender.abort(grant, "stopped")
            return
        trajectory = Trajectory(
            grant.ticket, grant.slot, result.length, result.env_steps, result.version
        )
        self._sender.commit(trajectory, result.episodes)
        self._counters["trajectories"] += 1

    def _begun(self, grant: Grant, version: Version) -> None:
        self._clock.enter("busy")
        self._sender.begin(grant, version)

    async def _rebuild(
        self, rollout: Rollout, error: EnvironmentFailedError | PoisonedTrajectoryError
    ) -> None:
        """The vector is made anew, as often as that fails, too; too many failures in the window end
        the run.
        """
        failure: EnvironmentFailedError | PoisonedTrajectoryError | None = error
        while failure is not None:
            self._count(failure)
            self._clock.enter("rebuilding")
            await asyncio.sleep(
                min(2.0, 0.01 * 2 ** len(self._failures))
            )  # back-off: what fails at once would fill the log
            try:
                await self._compute.run(rollout.rebuild)
            except (EnvironmentFailedError, PoisonedTrajectoryError) as again:
                failure = again
            else:
                failure = None

    def _count(self, error: EnvironmentFailedError | PoisonedTrajectoryError) -> None:
        """Tell of a failure. Raises RunError when there were too many."""
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

    def _rest_or_wait(self) -> None:
        if self._in_hand == 0:
            self._clock.enter("paused" if self._settings.value.paused else "waiting:grant")


def _reason(error: EnvironmentFailedError | PoisonedTrajectoryError) -> str:
    """What a ticket is dropped for."""
    return "env_error" if isinstance(error, EnvironmentFailedError) else "poisoned"
