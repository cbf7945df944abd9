"""Statistics of a run -> Recorder -> ``history.jsonl``, and the same rows to sinks."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tianflow.core.jsonable import json_ready
from tianflow.core.learning import StatisticSum, between
from tianflow.core.moments import durations
from tianflow.core.statistics import ReplayStatistics, RunStatistics, mean_or_none, quantile
from tianflow.interfaces import SinkRun
from tianflow.logs import logger, report_death
from tianflow.observability.learning import LearningTotals
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import by_staleness
from tianflow.observability.sinks import outlet as sinks
from tianflow.rundir.history import (
    NAME,
    SPACING_S,
    CreditsInForce,
    HistoryFile,
    HistoryRow,
    LearningMean,
    ReplayCounts,
    Row,
    TrainedStaleness,
    merged,
    newest_marks,
)

if TYPE_CHECKING:
    from tianflow.interfaces import RunControl

CLOSE_S = 5.0
"""A run ends even if the disk does not answer for this long."""

SHARES_S = 5.0
"""Components report about once a second. Shares over less time would show mostly the guess about
the time since the last report.
"""

log = logger("history")


class Recorder:
    """Samples a run once a second, and gives a line to the disk's thread when it is due.

    Consumes: statistics. Produces: lines of ``file``, and the same rows for ``outlets``. Waits: for
    time and the disk. Unblocked by: both. While the disk does not answer it does not sample, and it
    merges a row that could not be written into the next line.
    """

    def __init__(
        self,
        *,
        run: RunControl,
        file: HistoryFile,
        outlets: Sequence[sinks.SinkFeeder] = (),
        spacing_s: float = SPACING_S,
    ) -> None:
        self._run, self._file, self._outlets, self._spacing_s = run, file, outlets, spacing_s
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._rates = RunRates(read=run.statistics)
        self._before: RunStatistics | None = None
        self._totals = LearningTotals()
        self._learned: Mapping[str, StatisticSum] = {}
        self._offset = 0.0
        self._audited = 0
        self._resumed = False
        self._pending: Row | None = None
        self._written_at = -math.inf
        self._failing = False
        self._failure = ""
        self._writing: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Record until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            last = await loop.run_in_executor(self._disk, self._file.open)
        except OSError as error:
            last = None
            log.warning("the history of the run cannot be read", error=str(error))
        if last is not None:
            self._resumed = True
            # Lines after the checkpoint that the run resumed from are true, too: time never goes
            # back.
            self._offset = max(0.0, last - self._run.statistics().elapsed_s)
        while True:
            row = self._try_sample()
            # Half a sample early is nearer than half a sample late.
            if row and row["t"] - self._written_at >= self._file.period_s - self._spacing_s / 2:
                await self._write()
            await asyncio.sleep(self._spacing_s)

    async def close(self) -> None:
        """Write the last row and wait for the disk, for `CLOSE_S` at most."""
        self._try_sample()
        try:
            await asyncio.wait_for(self._write(), CLOSE_S)
        except TimeoutError:
            log.warning("the last line of the history was not written in time")
        self._disk.shutdown(wait=False)

    def sample(self) -> Row:
        """Take a sample; the pending line."""
        statistics = self._rates.sample()
        learned = self._totals.update(statistics)
        row = json_ready(self._row(statistics, between(self._learned, learned)))
        self._before, self._learned = statistics, learned
        self._pending = row if self._pending is None else merged(self._pending, row)
        return self._pending

    def _try_sample(self) -> Row | None:
        """`sample`; a failure costs one sample and not the history, and is logged. Returns the
        pending line.
        """
        try:
            self.sample()
        except Exception as error:  # a boundary: later samples may be good
            failure = f"{type(error).__name__}: {error}"
            if failure != self._failure:
                log.exception("a sample for the history of the run failed", error=failure)
            self._failure = failure
        return self._pending

    def count(self) -> None:
        """Update the run's counts of its sinks."""
        self._run.sinks.update((outlet.name, outlet.statistics()) for outlet in self._outlets)

    async def _write(self) -> None:
        row, self._pending = self._pending, None
        if row is None:  # every sample since the last line failed
            return
        # A cancelled recorder does not stop the write, so nothing else may change this row.
        self._writing = asyncio.ensure_future(self._append(row))
        await asyncio.shield(self._writing)

    async def _append(self, row: Row) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._file.append, row)
        except OSError as error:
            self._pending = row
            if not self._failing:
                log.warning("the history of the run cannot be written", error=str(error))
            self._failing = True
        else:
            self._written_at, self._failing = row["t"], False
            for outlet in self._outlets:
                outlet.offer(row)
            self.count()

    def _row(self, now: RunStatistics, learned: Mapping[str, StatisticSum]) -> HistoryRow:
        ledger, before = now.ledger, self._before
        t = now.elapsed_s + self._offset
        span = 0.0 if before is None else now.now - before.now
        window = 0.0  # back to the sample before
        marks, left_out = self._marks(now, t)
        long_enough = span >= SPACING_S / 2  # a shorter span says nothing about speed
        return HistoryRow(
            t=round(t, 3),
            span_s=round(span, 3),
            time=round(time.time(), 3),
            state=now.state,
            env_steps=now.env_steps,
            updates=max(0, ledger.version.number),  # -1 before the first version
            episodes=now.episodes,
            mean_return=mean_or_none(now.recent_returns),
            mean_length=mean_or_none(now.recent_lengths),
            learning={
                name: LearningMean(count=values.number, mean=values.mean)
                for name, values in learned.items()
            },
            steps_per_s=self._rates.steps_per_s(window) if long_enough else None,
            updates_per_s=self._rates.updates_per_s(window) if long_enough else None,
            staleness=staleness_between(before, now),
            queue=ledger.queue,
            credits=CreditsInForce(limit=ledger.credits_limit, in_use=ledger.in_use),
            shares=self._rates.shares(SHARES_S),
            durations=durations(() if before is None else before.components, now.components),
            dropped=ledger.dropped,
            violations=ledger.violations,
            replay=None
            if now.replay is None
            else _replay(now.replay, self._rates.held_back(window)),
            bottleneck=now.diagnosis.verdict,
            generation=now.generation,
            marks=marks,
            marks_left_out=left_out,
        )

    def _marks(self, now: RunStatistics, t: float) -> tuple[list[Row], int]:
        """Events since the sample before, and the number of omitted events."""
        marks: list[Row] = []
        at = round(t, 3)
        if self._resumed:
            self._resumed = False
            marks.append({"t": at, "kind": "resumed", "updates": now.ledger.version.number})
        marks += [{"t": at, "kind": "evaluation", **found} for found in self._evaluated(now)]
        audited, records = self._run.audited, self._run.audit()
        new = audited - self._audited
        self._audited = audited
        fresh = records[max(0, len(records) - new) :]
        for record in fresh:
            paths = record.get("new")
            changed = sorted(paths) if isinstance(paths, Mapping) else []
            marks.append(
                {
                    "t": at,
                    "kind": "change",
                    "action": record.get("action"),
                    "paths": changed,
                    "generation": now.generation,
                }
            )
        kept, left_out = newest_marks(marks)
        return kept, left_out + new - len(fresh)

    def _evaluated(self, now: RunStatistics) -> Iterator[Mapping[str, str | float]]:
        """Evaluations since the sample before. Further ones have a ``name``."""
        before = self._before
        if now.evaluation and (before is None or now.evaluation != before.evaluation):
            yield now.evaluation
        for name, found in now.further_evaluations.items():
            if before is None or found != before.further_evaluations.get(name):
                yield {"name": name, **found}


def staleness_between(before: RunStatistics | None, now: RunStatistics) -> TrainedStaleness:
    """Exact staleness of the trajectories trained on between two samples (of all so far without the
    first), and the larger of the two bounds.
    """
    old = {} if before is None else before.ledger.staleness
    trained = {
        staleness: count - old.get(staleness, 0)
        for staleness, count in sorted(now.ledger.staleness.items())
    }
    counts = {staleness: count for staleness, count in trained.items() if count > 0}
    bounds = [sample.ledger.max_staleness for sample in (before, now) if sample is not None]
    bound = None if None in bounds else max(bound for bound in bounds if bound is not None)
    total = sum(counts.values())
    if not total:
        return TrainedStaleness(bound=bound)
    return TrainedStaleness(
        count=total,
        min=min(counts),
        mean=sum(staleness * count for staleness, count in counts.items()) / total,
        p99=quantile(counts, 0.99),
        max=max(counts),
        bound=bound,
        counts=by_staleness(counts),
    )


def _replay(replay: ReplayStatistics, held_back: Mapping[str, float]) -> ReplayCounts:
    return ReplayCounts(
        items=replay.items if replay.shards else None,
        capacity=replay.limits.capacity,
        inserted=replay.inserts,
        drawn=replay.drawn,
        trained=replay.trained,
        discarded=replay.discarded,
        samples_per_insert=replay.samples_per_insert,
        samples_per_insert_target=replay.samples_per_insert_target,
        held_back=held_back,
    )


@contextlib.asynccontextmanager
async def recorded(run: RunControl) -> AsyncIterator[None]:
    """Record ``run`` in its directory while the context is open, and its end. An error here does
    not reach the run.
    """
    feeding = sinks.feeders(
        run.config, SinkRun(run.id, run.directory, json_ready(run.config.model_dump(mode="json")))
    )
    recorder = Recorder(run=run, file=HistoryFile(run.directory / NAME), outlets=feeding)
    recorder.count()  # from 0, so a scraper sees the first increase
    task = asyncio.get_running_loop().create_task(recorder.run(), name="history")
    report_death(task, log, "the history of the run is no longer recorded")
    try:
        yield
    finally:
        task.cancel()
        results = [
            *await asyncio.gather(task, return_exceptions=True),
            *await asyncio.gather(recorder.close(), return_exceptions=True),
        ]
        results += await asyncio.gather(
            *(outlet.close(sinks.FLUSH_S) for outlet in feeding), return_exceptions=True
        )
        recorder.count()
        for error in results:
            if isinstance(error, Exception):
                log.warning("the history of the run is not whole", error=repr(error))
