"""Hosts in processes of their own, however a launcher starts them: their handles, and their
messages.

A launcher calls `run_hosts` with a function that starts one process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgpack

from tianflow.channels.broadcast import GapCounter
from tianflow.channels.messages import (
    MESSAGES,
    ComponentEnded,
    ComponentStarted,
    Drawn,
    Dropped,
    Evaluate,
    Evaluated,
    EventPublished,
    Handlers,
    Heartbeat,
    HostFailed,
    ItemsSaved,
    LearnerRested,
    LoadPolicy,
    NotEvaluated,
    PolicyLoaded,
    Prioritised,
    PutSettings,
    RecordLogged,
    RestLearner,
    SaveState,
    SetComponents,
    StartHost,
    StateNotSaved,
    StateSaved,
    StatisticsReported,
    Stop,
    Stored,
)
from tianflow.channels.shm import SharedTransport
from tianflow.core.payloads import Evaluation, SavedState, Version
from tianflow.core.resource_limits import refusal
from tianflow.errors import BrokenChannelError, CheckpointError, EnvironmentFailedError, RunError
from tianflow.exchange.remote import ServedExchange
from tianflow.exchange.shards import LinkShardPort
from tianflow.launchers.host_forker import HOST_ENVIRONMENT
from tianflow.logs import log_foreign
from tianflow.planning.memory import DRAW_SLOTS, slots_capacity
from tianflow.planning.placement import bells_wanted

if TYPE_CHECKING:
    from pathlib import Path

    from tianflow.channels.messages import ShardAnswer
    from tianflow.config.model import Config
    from tianflow.core.payloads import Activity, TrajectoryLayout
    from tianflow.core.program import HostPlan, HostSpec
    from tianflow.interfaces import (
        Connects,
        HostProcess,
        MessageLink,
        RunView,
        StartProcess,
        Transport,
    )

T = TypeVar("T")


def host_environment(run_id: str, host: str) -> dict[str, str]:
    """Environment variables of a process that runs ``host`` and is started by other means than a
    fork: those of this process, its import path, one thread for each numerical library, and the
    names of run and host.
    """
    return {
        **HOST_ENVIRONMENT,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TIANFLOW_RUN": run_id,
        "TIANFLOW_HOST": host,
    }


def shared_slots(
    *,
    config: Config,
    layout: TrajectoryLayout,
    draws: TrajectoryLayout | None,
    bells: int | None = None,
) -> SharedTransport:
    """`tianflow.interfaces.Launcher.slots` for hosts on one machine: shared memory, sized by
    ``balance.memory_limit``. ``bells``: number of doorbells; None: those of all hosts.
    """
    return SharedTransport(
        layout=layout,
        capacity=slots_capacity(config, layout),
        draws=draws,
        draw_slots=DRAW_SLOTS,
        bells=bells_wanted(config) if bells is None else bells,
    )


async def run_hosts(run: RunView, transport: Transport, start_process: StartProcess) -> None:
    """Run ``run`` to its end, each host in a process of ``start_process``.

    After a cancellation, processes may be left. The launcher has to end them.
    """
    learner_started = asyncio.Event()

    async def start(host: HostSpec, incarnation: int) -> RemoteHost:
        if host.components[0].role not in ("learner", "rank", "replay"):
            await learner_started.wait()  # only the learner knows how large the weights are
        plan = await run.plan_host(host, incarnation)
        remote = RemoteHost(run=run, plan=plan, learner_started=learner_started)
        await remote.start(transport, start_process)
        return remote

    await run.run(start)


class RemoteHost:
    """One host process: its `HostHandle`, the port to a learner or evaluator in it, and the
    handlers of its messages.

    Args:
        run: that it belongs to.
        plan: what the host builds its components from.
        learner_started: set once a learner on this host works.
    """

    def __init__(self, *, run: RunView, plan: HostPlan, learner_started: asyncio.Event) -> None:
        self._run, self._plan, self._host = run, plan, plan.host
        self._learner_started = learner_started
        self._roles = {component.name: component.role for component in plan.host.components}
        self._pending = set(self._roles)
        self._process: HostProcess
        self._link: MessageLink
        self._last_message = time.monotonic()
        self._activities: Sequence[Activity] = ()
        self._gaps = GapCounter()
        self._requests = itertools.count()
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._forget_settings: Callable[[], None] = lambda: None
        self._failure = ""
        self._gone = False
        self._handlers: Handlers

    async def start(self, transport: Connects, start_process: StartProcess) -> None:
        """Start the process. Raises RunError if it cannot be started."""
        try:
            connection = transport.connect()
        except OSError as error:
            raise RunError(
                "launcher", refusal(error, f"host {self._host.name!r} cannot be connected")
            ) from error
        try:
            self._link = connection.open_link(
                handle=self._handle, closed=lambda: None, failed=self._message_failed
            )
            self._handlers = self._make_handlers()
            start = StartHost(self._plan, self._settings(), transport.address)
            payload = msgpack.packb(MESSAGES.encode(start))
            try:
                self._process = await start_process(
                    self._host.name, payload, connection.descriptors
                )
            except BaseException:
                self._link.close()
                raise
        finally:
            connection.close()
        if "learner" in self._roles.values():
            self._run.inbox.register_learner(self)
        if "evaluator" in self._roles.values():
            self._run.inbox.register_evaluator(self)
        self._forget_settings = self._run.settings.on_change(self._send_settings)
        self._send_settings()  # they may have changed while the process was started

    # Handle
    # ----------------------------------------------------------------------------------------------

    async def wait(self) -> str:
        """Wait until the process and its group are gone. How it ended."""
        status = await self._process.wait()
        await asyncio.sleep(0)
        self._link.drain()  # what it sent before it died still counts
        self._link.close()
        self._forget_settings()
        self._gone = True
        for future in self._answers.values():
            if not future.done():
                future.set_exception(self._broken())
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}: {self._failure}" if self._failure else how

    def ask_to_stop(self) -> None:
        """Ask the host to flush and leave."""
        self._link.send(Stop())

    def kill(self) -> None:
        """End the process now, stopped or not."""
        self._process.kill()

    @property
    def started(self) -> bool:
        """True once all its components work."""
        return not self._pending

    @property
    def silent_for(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._last_message

    @property
    def activities(self) -> Sequence[Activity]:
        """As of the last heartbeat."""
        return self._activities

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def place(self) -> str:
        """The machine that it runs on (`tianflow.interfaces.ShardPort`)."""
        return ""

    def reconcile(self, host: HostSpec) -> None:
        """Run exactly the components of ``host``."""
        before, self._host = set(self._roles), host
        self._roles = {component.name: component.role for component in host.components}
        self._pending = self._pending & set(self._roles) | set(self._roles) - before
        self._link.send(SetComponents(host.components))

    # Ports
    # ----------------------------------------------------------------------------------------------

    async def save(self, staged: Path) -> SavedState:
        """Write the learner's state into ``staged``."""
        return await self._request(SavedState, lambda number: SaveState(number, staged))

    async def rest(self) -> Version:
        """Publish the newest version at the next boundary."""
        return await self._request(Version, RestLearner)

    async def load(self, at_least: Version) -> Version:
        """Load the newest version for evaluations."""
        return await self._request(Version, lambda number: LoadPolicy(number, at_least))

    async def evaluate(self, at_least: Version, name: str) -> Evaluation:
        """Play the evaluation ``name`` with the version that was loaded last."""
        return await self._request(Evaluation, lambda number: Evaluate(number, at_least, name))

    async def _request(self, answer: type[T], make: Callable[[int], object]) -> T:
        if self._gone:  # it may have gone since the caller looked
            raise self._broken()
        number = next(self._requests)
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._link.send(make(number))
        try:
            found = await future
            assert isinstance(found, answer)
            return found
        finally:
            del self._answers[number]

    def _broken(self) -> BrokenChannelError:
        return BrokenChannelError(f"host {self._host.name!r} is gone")

    def _answer(self, number: int, answer: object) -> None:
        future = self._answers.get(number)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    # Messages
    # ----------------------------------------------------------------------------------------------

    def _make_handlers(self) -> Handlers:
        inbox, answer = self._run.inbox, self._answer
        served = ServedExchange(
            exchange=self._run.exchange, link=self._link, on_episodes=inbox.episodes_finished
        )
        return Handlers(
            {
                **served.handlers,
                EventPublished: self._event,
                RecordLogged: self._logged,
                Heartbeat: self._beat,
                StatisticsReported: lambda message: inbox.report(message.components),
                ComponentStarted: self._started,
                ComponentEnded: lambda message: inbox.component_ended(message.name),
                HostFailed: self._failed,
                StateSaved: lambda message: answer(message.request, message.state),
                StateNotSaved: lambda m: answer(m.request, CheckpointError(m.reason)),
                LearnerRested: lambda message: answer(message.request, message.version),
                PolicyLoaded: lambda message: answer(message.request, message.version),
                Evaluated: lambda message: answer(message.request, message.evaluation),
                NotEvaluated: lambda m: answer(
                    m.request, EnvironmentFailedError(m.summary, m.details)
                ),
                **dict.fromkeys(
                    (Stored, Drawn, Prioritised, Dropped, ItemsSaved), self._shard_answered
                ),
            }
        )

    def _handle(self, message: object) -> None:
        self._last_message = time.monotonic()
        self._handlers[type(message)](message)

    def _message_failed(self, error: Exception) -> None:
        """A message that breaks a rule ends the run, and the error names the host."""
        details = "".join(traceback.format_exception(error))
        summary = f"a message from host {self._host.name!r} was refused: {error!r}"
        self._run.inbox.fail(RunError("coordinator", summary, details))

    def _beat(self, message: Heartbeat) -> None:
        self._activities = message.activities

    def _event(self, message: EventPublished) -> None:
        self._run.inbox.events_lost(self._gaps.lost(message.sequence))
        self._run.inbox.publish(message.event)

    def _logged(self, message: RecordLogged) -> None:
        """Log a record of the host here. A record names its host unless it has a component."""
        values = {"host": self._host.name, **message.values}
        if "component" in message.values:
            del values["host"]
        log_foreign(message.logger, message.level, message.event, values)

    def _started(self, message: ComponentStarted) -> None:
        self._pending.discard(message.name)
        match self._roles.get(message.name):
            case "learner":
                self._learner_started.set()
            case "replay":
                self._run.inbox.shard_opened(
                    self._shard, self._plan.incarnation, LinkShardPort(self._link, self.place)
                )
        self._run.inbox.component_started(message.name)

    def _shard_answered(self, message: ShardAnswer) -> None:
        self._run.inbox.shard_answered(self._shard, self._plan.incarnation, message)

    @property
    def _shard(self) -> int:
        """Index of the host's replay shard."""
        return self._plan.host.components[0].index

    def _failed(self, message: HostFailed) -> None:
        self._failure = message.summary
        self._run.inbox.fail(RunError(message.component, message.summary, message.details))

    def _settings(self) -> PutSettings:
        settings = self._run.settings
        return PutSettings.of(settings.value, settings.key)

    def _send_settings(self) -> None:
        self._link.send(self._settings())
