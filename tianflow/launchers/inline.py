"""The launcher ``inline``: everything on one loop in one process. For tests, debugging and the
smallest machines.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING

from tianflow.channels.memory import HeapSlots, MemoryWeights
from tianflow.core.payloads import Version
from tianflow.core.program import LauncherCapabilities
from tianflow.exchange.local import MemoryBatchSource, MemoryTrajectorySender
from tianflow.exchange.shards import ShardEnd
from tianflow.hosts.component_host import ComponentHost
from tianflow.planning.memory import DRAW_SLOTS, slots_capacity, slots_wanted
from tianflow.planning.placement import bells_wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tianflow.channels.arena import Arena
    from tianflow.config.model import Config
    from tianflow.core.payloads import Activity, TrajectoryLayout
    from tianflow.core.program import HostPlan, HostSpec
    from tianflow.core.statistics import ComponentStatistics
    from tianflow.errors import RunError
    from tianflow.interfaces import Bell, EventPublisher, RunView, SettingsReader, SlotOwner

COMPUTE_MODULES = (
    "tianflow.components.rollout",
    "tianflow.components.evaluator",
    "tianflow.components.stacking",
)
THREAD_END_S = 1.0
"""A compute thread that works ends within a step or a minibatch."""
ROOM_FOR_CHANGES = 8
"""A live change may want more slots than the start: the arena has address space for so many times
as many, within the memory limit.
"""


class InlineLauncher:
    """`tianflow.interfaces.Launcher`: one host in the coordinator's own loop."""

    capabilities = LauncherCapabilities(processes=False, binds_cores=False)

    def prepare(self) -> None:
        """Import what components import, PyTorch included: that takes seconds, which would block
        the loop.
        """
        for module in COMPUTE_MODULES:
            importlib.import_module(module)

    def slots(
        self, *, config: Config, layout: TrajectoryLayout, draws: TrajectoryLayout | None = None
    ) -> HeapSlots:
        """Slots in ordinary memory."""
        room = max(256, ROOM_FOR_CHANGES * slots_wanted(config))
        capacity = min(slots_capacity(config, layout), room)
        return HeapSlots(
            layout=layout,
            capacity=capacity,
            draws=draws,
            draw_slots=DRAW_SLOTS,
            bells=bells_wanted(config),
        )

    async def launch(self, run: RunView, slots: SlotOwner) -> None:
        """Run until the end."""

        async def start(host: HostSpec, incarnation: int) -> InlineHost:
            plan = await run.plan_host(host, incarnation)
            return InlineHost(run=run, plan=plan, slots=slots)

        await run.run(start)


class MemoryEnds:
    """`tianflow.interfaces.Ends` and `HostEnd` in the coordinator's own process.

    Args:
        run: that they belong to.
        plan: of the host.
        slots: of the run.
    """

    def __init__(self, *, run: RunView, plan: HostPlan, slots: SlotOwner) -> None:
        self._run, self._slots, self._incarnation = run, slots, plan.incarnation
        self._weights = MemoryWeights()
        self._shards = {c.name: c.index for c in plan.host.components if c.role == "replay"}
        self._shard_ends: dict[int, ShardEnd] = {}
        self.pending = {component.name for component in plan.host.components}
        """Components that do not work yet."""
        self.activities: Sequence[Activity] = ()
        """As of the last heartbeat."""

    @property
    def settings(self) -> SettingsReader:
        """The coordinator's own cell."""
        return self._run.settings

    @property
    def events(self) -> EventPublisher:
        """The coordinator's inbox."""
        return self._run.inbox

    def sender(self, holder: str) -> MemoryTrajectorySender:
        """An actor's end."""
        return MemoryTrajectorySender(
            exchange=self._run.exchange,
            holder=holder,
            on_episodes=self._run.inbox.episodes_finished,
        )

    def source(self) -> MemoryBatchSource:
        """The learner's end."""
        return MemoryBatchSource(exchange=self._run.exchange, draws=self._slots.draws)

    def shard_end(self, index: int) -> ShardEnd:
        """The end of a replay shard."""
        assert self._slots.draws is not None
        inbox, incarnation = self._run.inbox, self._incarnation
        end = ShardEnd(
            slots=self._run.exchange.arena,
            draws=self._slots.draws,
            answer=lambda answer: inbox.shard_answered(index, incarnation, answer),
        )
        self._shard_ends[index] = end
        return end

    @property
    def arena(self) -> Arena:
        """The coordinator's own slots."""
        return self._run.exchange.arena

    @property
    def bells(self) -> Sequence[Bell]:
        """Of the run."""
        return self._slots.bells

    def weights_reader(self, nbytes: int) -> MemoryWeights:  # noqa: ARG002 - it holds any size
        """The one store."""
        return self._weights

    def weights_writer(self, nbytes: int) -> MemoryWeights:  # noqa: ARG002 - as above
        """The one store."""
        return self._weights

    async def newest_weights(self, version: Version) -> None:
        """Wait until weights at least as new as ``version`` are published."""
        if self._weights.version < version:
            await self._weights.wait_newer_than(Version(version.lineage, version.number - 1))

    def component_started(self, name: str) -> None:
        """To the coordinator."""
        self.pending.discard(name)
        if (index := self._shards.get(name)) is not None:
            self._run.inbox.shard_opened(index, self._incarnation, self._shard_ends[index])
        self._run.inbox.component_started(name)

    def component_ended(self, name: str) -> None:
        """To the coordinator."""
        self._run.inbox.component_ended(name)

    def report(self, statistics: Sequence[ComponentStatistics]) -> None:
        """To the coordinator."""
        self._run.inbox.report(statistics)

    def heartbeat(self, activities: tuple[Activity, ...]) -> None:
        """For the supervisor."""
        self.activities = activities

    def fail(self, error: RunError) -> None:
        """To the coordinator."""
        self._run.inbox.fail(error)


class InlineHost:
    """`tianflow.interfaces.HostHandle` of a host without a process.

    Args:
        run: that it belongs to.
        plan: what the host builds its components from.
        slots: of the run.
    """

    def __init__(self, *, run: RunView, plan: HostPlan, slots: SlotOwner) -> None:
        self._exchange, self._incarnation = run.exchange, plan.incarnation
        self._actors = {c.name for c in plan.host.components if c.role == "actor"}
        self._reason = "stopped"
        self._ends = MemoryEnds(run=run, plan=plan, slots=slots)
        self._host = ComponentHost(plan=plan, ends=self._ends, reports=self._ends)
        run.inbox.register_learner(self._host)
        run.inbox.register_evaluator(self._host)

    async def wait(self) -> str:
        """Wait until every component has ended. A thread cannot be killed: while it hangs in an
        environment, the slots that it may write to stay in quarantine.
        """
        failure = await self._host.stopped
        await self._host.close()
        ended, _ = await asyncio.wait({self._host.thread_ended}, timeout=THREAD_END_S)
        if not ended:
            for actor in self._actors:
                self._detach(actor, f"{actor} (thread of incarnation {self._incarnation})")
        return failure or "stopped"

    def _detach(self, actor: str, name: str) -> None:
        self._exchange.holder_detached(actor, name, self._reason)
        self._host.thread_ended.add_done_callback(
            lambda _: self._exchange.holder_lost(name, self._reason)
        )

    def ask_to_stop(self) -> None:
        """End."""
        self._host.stop()

    def kill(self) -> None:
        """End: there is no process to kill."""
        self._reason = "env_hang"
        self._host.stop()

    @property
    def started(self) -> bool:
        """True once all components work."""
        return not self._ends.pending

    @property
    def silent_for(self) -> float:
        """0: it shares the coordinator's loop."""
        return 0.0

    @property
    def activities(self) -> Sequence[Activity]:
        """As of the last heartbeat."""
        return self._ends.activities

    def reconcile(self, host: HostSpec) -> None:
        """Run exactly the components of ``host``."""
        self._actors |= {c.name for c in host.components if c.role == "actor"}
        self._host.reconcile(host.components)
