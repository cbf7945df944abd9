"""trajectories, priorities -> ReplayShard -> drawn items."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tianflow.core.payloads import (
    DrawPart,
    DropItems,
    Holdings,
    Prioritise,
    SaveItems,
    ShardRequest,
    StateFile,
    StoreTrajectory,
)
from tianflow.core.statistics import ComponentStatistics, HistogramBuilder, StateClock
from tianflow.errors import CheckpointError, WouldBlock
from tianflow.logs import logger
from tianflow.replay.fragments import Fragment, StepStream
from tianflow.rundir.checkpoints import write_arrays

if TYPE_CHECKING:
    from tianflow.exchange.shards import ShardEnd
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import SettingsReader
    from tianflow.replay.shard import Shard


log = logger("replay")
ALL = np.iinfo(np.int64).max
"""Every version is older than this one."""


class ReplayShard:
    """Keeps trajectories and draws items of them, one request after the other.

    Consumes: trajectories, requests to draw, priorities. Produces: parts of draws.
    Waits: for a request; for its turn on the compute thread. Unblocked by: the exchange.

    Args:
        name: its place, e.g. ``"replay-0"``.
        host: the process it lives in.
        end: its end of the channel.
        settings: live settings.
        compute: the host's compute thread.
        make_shard: allocates the memory, on the compute thread.
        seed: of its draws.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        end: ShardEnd,
        settings: SettingsReader,
        compute: Compute,
        make_shard: Callable[[], Shard],
        seed: int,
    ) -> None:
        self.name = name
        self._host, self._end, self._settings, self._compute, self._make_shard = (
            host,
            end,
            settings,
            compute,
            make_shard,
        )
        self._generator = np.random.default_rng(seed)
        self._clock = StateClock()
        self._seconds = {
            "insert_seconds": HistogramBuilder(),
            "draw_seconds": HistogramBuilder(),
            "prioritise_seconds": HistogramBuilder(),
        }
        self._counters = {"inserted_items": 0.0, "drawn_items": 0.0, "refused_priorities": 0.0}
        self._holdings = Holdings()
        self._untold = 0
        self._shard: Shard

    async def run(self, started: Callable[[], None]) -> None:
        """Until cancelled."""
        self._shard = await self._compute.run(self._make_shard)
        started()
        while True:
            self._clock.enter("waiting:request")
            first = await self._end.receive()
            # The priorities of one draw and the request for the next come together: one turn of the
            # thread, and one message back.
            requests = (first, *self._end.receive_soon())
            self._clock.enter("busy")
            for answer in await self._compute.run(partial(self._do_all, requests)):
                answer()

    def statistics(self) -> ComponentStatistics:
        """Where its time goes, and what it holds."""
        holdings = self._holdings
        return ComponentStatistics(
            name=self.name,
            role="replay",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.key,
            counters=dict(self._counters),
            gauges={
                "items": float(holdings.items),
                "steps": float(holdings.steps),
                "memory_bytes": float(holdings.nbytes),
            },
            distributions={name: seconds.read() for name, seconds in self._seconds.items()},
        )

    # On the compute thread; what comes back is the answer, to be given on the loop
    # -----------------------------------

    def _do_all(self, requests: Sequence[ShardRequest]) -> list[Callable[[], None]]:
        return [self._do(request) for request in requests]

    def _do(self, request: ShardRequest) -> Callable[[], None]:
        began = time.monotonic()
        match request:
            case StoreTrajectory():
                answer, kind = self._store(request), "insert_seconds"
            case DrawPart():
                answer, kind = self._draw(request), "draw_seconds"
            case Prioritise():
                answer, kind = self._prioritise(request), "prioritise_seconds"
            case SaveItems(path=path):
                file, holdings = self._keep(Path(path)), self._look()
                return lambda: self._end.saved(file, holdings)
            case DropItems(reason=reason):
                if reason:
                    self._drop()
                holdings = self._look()
                return lambda: self._end.dropped(holdings)
        self._seconds[kind].add(time.monotonic() - began)
        return answer

    def _store(self, request: StoreTrajectory) -> Callable[[], None]:
        arrays = self._end.trajectory(request.slot)
        actor, incarnation, made, number = arrays["stream"].tolist()
        found = self._shard.insert(
            Fragment(arrays, request.length, StepStream(actor, incarnation << 32 | made), number)
        )
        self._counters["inserted_items"] += found.items
        holdings = self._look()
        return lambda: self._end.stored(request.ticket, found.items, holdings)

    def _draw(self, request: DrawPart) -> Callable[[], None]:
        self._shard.exclude_older_than(request.oldest)
        columns = slice(request.first, request.first + request.items)
        views = self._end.draw(request.slot)
        one_axis = ("version", "key", "probability", "weight", "priority")
        out = {
            name: view[columns]
            if name in one_axis or name.startswith("state/")
            else view[:, columns]
            for name, view in views.items()
        }
        try:
            drawn = self._shard.draw(request.items, self._generator, out)
        except WouldBlock:
            holdings = self._look()
            return lambda: self._end.drawn(request.draw, 0, holdings)
        out["key"][:], out["probability"][:], out["priority"][:] = (
            drawn.keys,
            drawn.probability,
            np.nan,
        )
        self._counters["drawn_items"] += request.items
        holdings = self._look()
        return lambda: self._end.drawn(request.draw, request.items, holdings)

    def _prioritise(self, request: Prioritise) -> Callable[[], None]:
        """What is no priority changes nothing and is counted: NaN where the learner gave none, or
        what an algorithm got wrong.
        """
        views, columns = (
            self._end.draw(request.slot),
            slice(request.first, request.first + request.items),
        )
        priorities = views["priority"][columns].astype(np.float64)
        good = np.isfinite(priorities) & (priorities >= 0.0)
        self._shard.update_priorities(views["key"][columns][good], priorities[good])
        self._counters["refused_priorities"] += float(np.count_nonzero(~good))
        holdings = self._look()
        return lambda: self._end.prioritised(request.draw, holdings)

    def _drop(self) -> None:
        """Let everything go, windows in the making included: completed later, they would bring old
        steps back.
        """
        streams = {
            int(name.split("/")[1]) for name in self._shard.snapshot() if name.startswith("actor/")
        }
        self._untold += sum(self._shard.close_stream(actor) for actor in streams)
        self._shard.exclude_older_than(ALL)

    def _keep(self, path: Path) -> StateFile | None:
        try:
            return write_arrays(path, self._shard.snapshot())
        except CheckpointError as error:
            log.warning("a replay shard cannot be kept", component=self.name, error=str(error))
            return None

    def _look(self) -> Holdings:
        told = self._shard.statistics()
        self._holdings = Holdings(
            items=told.items.resident,
            mass=told.mass,
            steps=told.steps.resident,
            inserted_steps=told.steps.inserted,
            removed_items=sum(told.items.removed.values())
            - self._untold,  # of those nobody has heard that they came
            nbytes=told.nbytes,
        )
        return self._holdings
