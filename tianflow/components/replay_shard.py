"""trajectories, priorities -> ReplayShard -> drawn items."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tianflow.core.layout import column_axis
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
from tianflow.core.statistics import (
    ComponentStatistics,
    HistogramBuilder,
    ShardMeasures,
    StateClock,
)
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
NEWEST = np.iinfo(np.int64).max
"""Every version number is below this one."""


class ReplayShard:
    """Stores trajectories and draws items, one request after the other.

    Consumes: trajectories, draw requests, priorities. Produces: parts of draws.
    Waits: for a request; for its turn on the compute thread. Unblocked by: the exchange.

    Args:
        name: name of the component, e.g. ``"replay-0"``.
        host: name of its host process.
        end: end of the channel.
        settings: live settings.
        compute: compute thread of the host.
        make_shard: allocates the memory, on the compute thread.
        seed: seed of its draws.
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
        self._unreported = 0
        self._shard: Shard

    async def run(self, started: Callable[[], None]) -> None:
        """Run until cancelled."""
        self._shard = await self._compute.run(self._make_shard)
        started()
        while True:
            self._clock.enter("waiting:request")
            first = await self._end.receive()
            # The priorities of one draw and the request for the next arrive together. They share
            # one turn of the thread, and their answers share one message.
            requests = (first, *self._end.receive_soon())
            self._clock.enter("busy")
            for answer in await self._compute.run(partial(self._do_all, requests)):
                answer()

    def statistics(self) -> ComponentStatistics:
        """Times, counters and contents."""
        holdings = self._holdings
        return ComponentStatistics(
            name=self.name,
            role="replay",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.value.generation,
        ).with_measures(
            ShardMeasures(
                **self._counters,
                items=float(holdings.items),
                steps=float(holdings.steps),
                memory_bytes=float(holdings.nbytes),
                insert_seconds=self._seconds["insert_seconds"].read(),
                draw_seconds=self._seconds["draw_seconds"].read(),
                prioritise_seconds=self._seconds["prioritise_seconds"].read(),
            )
        )

    # Executed on the compute thread. Each result is the answer, which the event loop sends.
    # ----------------------------------------------------------------------------------------------

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
                file, holdings = self._save(Path(path)), self._update_holdings()
                return lambda: self._end.saved(file, holdings)
            case DropItems(reason=reason):
                if reason:
                    self._drop()
                holdings = self._update_holdings()
                return lambda: self._end.dropped(holdings)
        self._seconds[kind].add(time.monotonic() - began)
        return answer

    def _store(self, request: StoreTrajectory) -> Callable[[], None]:
        arrays = self._end.trajectory(request.slot)
        actor, incarnation, environments, number = arrays["stream"].tolist()
        stream = StepStream.of(actor, incarnation=incarnation, environments=environments)
        found = self._shard.insert(Fragment(arrays, request.length, stream, number))
        self._counters["inserted_items"] += found.items
        holdings = self._update_holdings()
        return lambda: self._end.stored(request.ticket, found.items, holdings)

    def _draw(self, request: DrawPart) -> Callable[[], None]:
        self._shard.exclude_older_than(request.oldest)
        columns = slice(request.first, request.first + request.items)
        views = self._end.draw(request.slot)
        out = {
            name: view[:, columns] if column_axis(name) else view[columns]
            for name, view in views.items()
        }
        try:
            drawn = self._shard.draw(request.items, self._generator, out)
        except WouldBlock:
            holdings = self._update_holdings()
            return lambda: self._end.drawn(request.draw, 0, holdings)
        out["key"][:], out["probability"][:], out["priority"][:] = (
            drawn.keys,
            drawn.probability,
            np.nan,
        )
        self._counters["drawn_items"] += request.items
        holdings = self._update_holdings()
        return lambda: self._end.drawn(request.draw, request.items, holdings)

    def _prioritise(self, request: Prioritise) -> Callable[[], None]:
        """Apply priorities. Invalid ones are skipped and counted.

        A priority is NaN where the learner gave none, and may be invalid because of a bug in an
        algorithm.
        """
        views, columns = (
            self._end.draw(request.slot),
            slice(request.first, request.first + request.items),
        )
        priorities = views["priority"][columns].astype(np.float64)
        good = np.isfinite(priorities) & (priorities >= 0.0)
        self._shard.update_priorities(views["key"][columns][good], priorities[good])
        self._counters["refused_priorities"] += float(np.count_nonzero(~good))
        holdings = self._update_holdings()
        return lambda: self._end.prioritised(request.draw, holdings)

    def _drop(self) -> None:
        """Remove all items, including windows in progress, which would hold old steps later."""
        streams = {
            int(name.split("/")[1]) for name in self._shard.snapshot() if name.startswith("actor/")
        }
        self._unreported += sum(self._shard.close_stream(actor) for actor in streams)
        self._shard.exclude_older_than(NEWEST)

    def _save(self, path: Path) -> StateFile | None:
        try:
            return write_arrays(path, self._shard.snapshot())
        except CheckpointError as error:
            log.warning("a replay shard could not be saved", component=self.name, error=str(error))
            return None

    def _update_holdings(self) -> Holdings:
        found = self._shard.statistics()
        self._holdings = Holdings(
            items=found.items.resident,
            mass=found.mass,
            steps=found.steps.resident,
            inserted_steps=found.steps.inserted,
            # Items completed by a drop were never reported as inserted.
            removed_items=sum(found.items.removed.values()) - self._unreported,
            nbytes=found.nbytes,
        )
        return self._holdings
