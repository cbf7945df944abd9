"""Many processes on one machine: the coordinator here, every host a child of a fork server, data in
shared memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from tianflow.channels.broadcast import GapCounter
from tianflow.channels.codec import decode_event, decode_statistics
from tianflow.channels.link import Link, Message, socket_pair
from tianflow.channels.shm import SharedArena, SharedMemory
from tianflow.core.layout import layout_to_wire, spec_to_wire
from tianflow.core.payloads import Evaluation, SavedState, StateFile, Version
from tianflow.errors import BrokenChannelError, CheckpointError, EnvironmentFailedError, RunError
from tianflow.exchange.remote import ServedExchange
from tianflow.exchange.shards import LinkShardPort
from tianflow.launchers.host_forker import ForkedHost, HostForker
from tianflow.planning.memory import DRAW_SLOTS, slots_capacity

if TYPE_CHECKING:
    from tianflow.channels.arena import Arena
    from tianflow.config.model import Config
    from tianflow.coordinator import Run
    from tianflow.core.payloads import TrajectoryLayout
    from tianflow.core.program import HostSpec
    from tianflow.interfaces import LiveSettings

T = TypeVar("T")
TARGET = "tianflow.hosts.main:main"
PRELOAD = (
    "torch",
    "tianflow.hosts.main",
    "tianflow.components.rollout",
    "tianflow.components.evaluator",
    "tianflow.components.stacking",
)


class SharedSlots:
    """Slots in memory that every process of the run maps."""

    def __init__(
        self, *, config: Config, layout: TrajectoryLayout, draws: TrajectoryLayout | None = None
    ) -> None:
        self._shared = SharedArena(layout=layout, capacity=slots_capacity(config, layout))
        self._draws: SharedArena | None = None
        if draws is None:
            return
        try:
            self._draws = SharedArena(layout=draws, capacity=DRAW_SLOTS)
            self._draws.add_slots(DRAW_SLOTS)
        except BaseException:
            self.close()
            raise

    @property
    def arena(self) -> Arena:
        """The coordinator's view."""
        return self._shared.arena

    @property
    def memory(self) -> SharedMemory:
        """What hosts attach to."""
        return self._shared.memory

    @property
    def draws(self) -> Arena | None:
        """With replay, where what is drawn lies; the coordinator's view."""
        return None if self._draws is None else self._draws.arena

    @property
    def fds(self) -> tuple[int, ...]:
        """What hosts attach to besides `memory`."""
        return () if self._draws is None else (self._draws.memory.fd,)

    def add_slots(self, count: int) -> None:
        """Give ``count`` more slots their pages."""
        self._shared.add_slots(count)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._shared.memory.close()
        if self._draws is not None:
            self._draws.memory.close()


class ProcessLauncher:
    """Runs each host of a program as a child process of its own."""

    slots = SharedSlots

    def prepare(self) -> None:
        """Nothing: children import what they need."""

    async def launch(self, run: Run, slots: SharedSlots) -> None:
        """Until the run has ended; no process, socket or memory is left."""
        weights_fd = SharedMemory.create_unsized("tianflow-weights")
        learner_up = asyncio.Event()
        try:
            async with HostForker(run_id=run.id, preload=PRELOAD) as nursery:

                async def start(host: HostSpec, incarnation: int) -> ProcessHost:
                    if host.components[0].role not in ("learner", "replay"):
                        await learner_up.wait()  # it alone knows how large the weights are
                    process = ProcessHost(
                        run=run, host=host, incarnation=incarnation, learner_up=learner_up
                    )
                    await process.start(
                        nursery, (slots.memory.fd, weights_fd, *slots.fds), slots.arena.capacity
                    )
                    return process

                await run.run(start)
        finally:
            os.close(weights_fd)


class ProcessHost:
    """One child process: its `HostHandle`, and what its messages mean. Also the port to the learner
    or evaluator in it.
    """

    def __init__(
        self, *, run: Run, host: HostSpec, incarnation: int, learner_up: asyncio.Event
    ) -> None:
        self._run, self._host, self._incarnation, self._learner_up = (
            run,
            host,
            incarnation,
            learner_up,
        )
        self._roles = {component.name: component.role for component in host.components}
        self._pending = set(self._roles)
        self._child: ForkedHost
        self._link: Link
        self._heard = time.monotonic()
        self._gaps = GapCounter()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._forget_settings: Callable[[], None] = lambda: None
        self._failure = ""
        self._gone = False
        episodes_finished = run.reception.episodes_finished
        served = ServedExchange(
            exchange=run.exchange, send=self._send, push=self._push, on_episodes=episodes_finished
        )
        self._handlers: dict[str, Callable[..., None]] = {
            **served.handlers,
            "event": self._event,
            "stats": self._stats,
            "started": self._started,
            "ended": self._run.reception.component_ended,
            "failed": self._failed,
            "saved": self._saved,
            "not_saved": lambda number, text: self._answer(number, CheckpointError(text)),
            "rested": lambda number, lineage, version: self._answer(
                number, Version(lineage, version)
            ),
            "not_evaluated": lambda number, summary, details: self._answer(
                number, EnvironmentFailedError(summary, details)
            ),
            **self._shard_handlers(),
            "evaluated": lambda number, v, returns, lengths: self._answer(
                number, Evaluation(Version(*v), tuple(returns), tuple(lengths))
            ),
        }

    async def start(self, nursery: HostForker, fds: tuple[int, ...], capacity: int) -> None:
        """Fork it. Raises RunError if that cannot be done."""
        ours, theirs = socket_pair()
        try:
            self._link = Link(end=ours, handle=self._handle, closed=lambda: None)
            order = msgpack.packb(await self._order(capacity))
            self._child = await nursery.spawn(
                self._host.name, TARGET, order, [theirs.fileno(), *fds]
            )
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        if "learner" in self._roles.values():
            self._run.reception.learner_port = self
        if "evaluator" in self._roles.values():
            self._run.reception.evaluator_port = self
        self._forget_settings = self._run.settings.on_change(self._send_settings)
        self._send_settings()  # whatever changed while the child was being forked

    # Handle
    # ----------------------------------------------------------------------------------------------

    async def wait(self) -> str:
        """Wait until it is gone, with everyone of its process group; say how it ended."""
        status = await self._child.wait()
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
        """It should flush and leave."""
        self._link.send("stop")

    def kill(self) -> None:
        """End it now, stopped or not."""
        self._child.kill()

    @property
    def started(self) -> bool:
        """True once all its components do their work."""
        return not self._pending

    @property
    def silent_for(self) -> float:
        """Seconds since its last message."""
        return time.monotonic() - self._heard

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def reconcile(self, host: HostSpec) -> None:
        """Run exactly the components of ``host``."""
        before, self._host = set(self._roles), host
        self._roles = {component.name: component.role for component in host.components}
        self._pending = self._pending & set(self._roles) | set(self._roles) - before
        self._link.send("components", [[c.name, c.role, c.index] for c in host.components])

    # Ports
    # ----------------------------------------------------------------------------------------------

    async def save(self, staged: Path) -> SavedState:
        """Write the learner's state into ``staged``."""
        return await self._ask(SavedState, "save", str(staged))

    async def rest(self) -> Version:
        """Publish the newest version at the next boundary."""
        return await self._ask(Version, "rest")

    async def evaluate(self, at_least: Version) -> Evaluation:
        """Judge the newest version."""
        return await self._ask(Evaluation, "evaluate", *at_least)

    async def _ask(self, answer: type[T], kind: str, *fields: object) -> T:
        if self._gone:  # whoever asks may have found it a moment before
            raise self._broken()
        number = next(self._numbers)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._link.send(kind, number, *fields)
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

    async def _order(self, capacity: int) -> dict[str, Any]:
        run, live = self._run, self._run.settings.value
        learner = any(component.role == "learner" for component in self._host.components)
        version, samples, found = (
            await run.keeper.next_start() if learner else (run.exchange.ledger.version, 0, None)
        )
        if self._host.components[0].role == "replay":
            found = run.keeper.resumed
        return {
            "host": self._host.name,
            "components": [[c.name, c.role, c.index] for c in self._host.components],
            "cores": list(self._host.cores),
            "threads": self._host.threads,
            "incarnation": self._incarnation,
            "era": run.era,
            "config": _plain(live),
            "bound": live.bound,
            "paused": live.paused,
            "generation": run.settings.key,
            "spec": spec_to_wire(run.spec),
            "layout": layout_to_wire(run.layout),
            "draws": None if run.draws is None else layout_to_wire(run.draws.layout),
            "capacity": capacity,
            "start": [list(version), samples],
            "published": list(run.exchange.ledger.published),
            "checkpoint": str(found) if found else None,
        }

    def _handle(self, message: Message) -> None:
        self._heard = time.monotonic()
        try:
            self._handlers[message[0]](*message[1:])
        except Exception as error:  # noqa: BLE001 - a boundary: a message that breaks a rule ends the run, and says so
            self._run.fail(
                RunError(
                    "coordinator",
                    f"{message[0]!r} from host {self._host.name!r}: {error!r}",
                    traceback.format_exc(),
                )
            )

    def _send(self, *message: object) -> None:
        self._link.send(*message)

    def _push(self) -> None:
        self._link.push()

    def _event(self, sequence: int, name: str, values: list[Any]) -> None:
        self._run.events.count_lost(self._gaps.lost(sequence))
        self._run.reception.publish(decode_event(name, values))

    def _stats(self, all_values: list[list[Any]]) -> None:
        for values in all_values:
            self._run.reception.report(decode_statistics(values))

    def _started(self, name: str) -> None:
        self._pending.discard(name)
        match self._roles.get(name):
            case "learner":
                self._learner_up.set()
            case "replay":
                self._run.reception.shard_opened(
                    self._host.components[0].index, self._incarnation, LinkShardPort(self._send)
                )
        self._run.reception.component_started(name)

    def _shard_handlers(self) -> dict[str, Callable[..., None]]:
        """What a replay shard answers."""
        shard = next(
            (component for component in self._host.components if component.role == "replay"), None
        )
        if shard is None:
            return {}
        answer = self._run.reception.shard_answers(shard.index, self._incarnation)
        return {
            name: partial(answer, name)
            for name in ("stored", "drawn", "prioritised", "dropped", "kept")
        }

    def _failed(self, component: str, summary: str, details: str) -> None:
        self._failure = summary
        self._run.fail(RunError(component, summary, details))

    def _saved(
        self, number: int, version: list[int], samples: int, sha256: str, nbytes: int
    ) -> None:
        self._answer(number, SavedState(Version(*version), samples, StateFile(sha256, nbytes)))

    def _send_settings(self) -> None:
        live = self._run.settings.value
        self._link.send(
            "settings",
            self._run.settings.key,
            _plain(live),
            live.bound,
            live.paused,
            live.hold_learner,
        )


def _plain(live: LiveSettings) -> Any:
    return json.loads(live.config.model_dump_json())
