"""statistics of a run -> Recorder -> ``history.jsonl``, and the same rows to sinks."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tianflow.core.jsonable import json_ready
from tianflow.core.moments import durations
from tianflow.core.statistics import ReplayStatistics, RunStatistics, quantile
from tianflow.logs import logger
from tianflow.observability.rates import RunRates
from tianflow.observability.run_document import by_age
from tianflow.observability.sinks import outlet as sinks
from tianflow.observability.sinks.base import SinkRun
from tianflow.rundir.history import NAME, SPACING_S, HistoryFile, Row, merged, newest_marks

if TYPE_CHECKING:
    from tianflow.interfaces import RunControl

CLOSE_S = 5.0
"""A disk that does not answer for longer must not keep a run from ending."""

SHARES_S = 5.0
"""Components report about once a second, and what they do since is guessed: over a shorter time the
guesses are what would be seen.
"""

log = logger("history")


class Recorder:
    """Samples a run once a second, and hands a line to the disk's thread whenever one is due.

    Consumes: statistics. Produces: lines of ``file``, and the same rows for ``outlets``. Waits: for
    time and the disk. Unblocked by: both; while the disk does not answer nothing is sampled, and
    what could not be written is merged into the next line.
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
        self._offset = 0.0
        self._audited = 0
        self._resumed = False
        self._pending: Row | None = None
        self._written_at = -math.inf
        self._failing = False
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
            # What came after the checkpoint that the run goes on from happened, too: time never
            # goes back.
            self._offset = max(0.0, last - self._run.statistics().elapsed_s)
        while True:
            row = self.sample()
            # Half a sample early is nearer than half a sample late.
            if row["t"] - self._written_at >= self._file.period_s - self._spacing_s / 2:
                await self._write()
            await asyncio.sleep(self._spacing_s)

    async def close(self) -> None:
        """Write where the run stands now, and what is left; waits for the disk, but not for
        long.
        """
        self.sample()
        try:
            await asyncio.wait_for(self._write(), CLOSE_S)
        except TimeoutError:
            log.warning("the last line of the history was not written in time")
        self._disk.shutdown(wait=False)

    def sample(self) -> Row:
        """Look now; the line so far."""
        statistics = self._rates.sample()
        row = self._row(statistics)
        self._before = statistics
        self._pending = row if self._pending is None else merged(self._pending, row)
        return self._pending

    def count(self) -> None:
        """Tell the run what its sinks got."""
        self._run.sinks.update((outlet.name, outlet.statistics()) for outlet in self._outlets)

    async def _write(self) -> None:
        row, self._pending = self._pending, None
        assert row is not None
        # Whoever records may be cancelled meanwhile; the line is then on its way all the same, and
        # its row is nobody else's.
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

    def _row(self, now: RunStatistics) -> Row:
        ledger, returns, before = now.ledger, now.recent_returns, self._before
        t = now.elapsed_s + self._offset
        span = 0.0 if before is None else now.now - before.now
        window = 0.0  # back to the sample before
        marks, left_out = self._marks(now, t)
        telling = span >= SPACING_S / 2  # what ended in less says nothing of speed
        return {
            "t": round(t, 3),
            "span_s": round(span, 3),
            "time": round(time.time(), 3),
            "state": now.state,
            "env_steps": now.env_steps,
            "updates": max(0, ledger.version.number),  # below 0 before the first version
            "episodes": now.episodes,
            "mean_return": sum(returns) / len(returns) if returns else None,
            "steps_per_s": self._rates.steps_per_s(window) if telling else None,
            "updates_per_s": self._rates.updates_per_s(window) if telling else None,
            "staleness": staleness_between(before, now),
            "queue": ledger.queue,
            "credits": {"limit": ledger.credits_limit, "in_use": ledger.in_use},
            "shares": self._rates.shares(SHARES_S),
            "durations": durations(() if before is None else before.components, now.components),
            "dropped": dict(ledger.dropped),
            "violations": ledger.violations,
            "replay": None
            if now.replay is None
            else _replay(now.replay) | {"held_back": self._rates.held_back(window)},
            "bottleneck": now.diagnosis.verdict,
            "generation": now.generation,
            "marks": marks,
            "marks_left_out": left_out,
        }

    def _marks(self, now: RunStatistics, t: float) -> tuple[list[Row], int]:
        """What happened since the sample before, and how much more that is not kept."""
        marks: list[Row] = []
        at = round(t, 3)
        if self._resumed:
            self._resumed = False
            marks.append({"t": at, "kind": "resumed", "updates": now.ledger.version.number})
        if now.evaluation and (self._before is None or now.evaluation != self._before.evaluation):
            marks.append({"t": at, "kind": "evaluation", **now.evaluation})
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


def staleness_between(before: RunStatistics | None, now: RunStatistics) -> Row:
    """Staleness of exactly what was trained on between two looks (all of it so far without the
    first), and the wider of the two bounds.
    """
    old = {} if before is None else before.ledger.staleness
    counts = {age: count - old.get(age, 0) for age, count in sorted(now.ledger.staleness.items())}
    counts = {age: count for age, count in counts.items() if count > 0}
    bounds = [look.ledger.max_staleness for look in (before, now) if look is not None]
    bound = None if None in bounds else max(bound for bound in bounds if bound is not None)
    total = sum(counts.values())
    if not total:
        return {
            "count": 0,
            "min": None,
            "mean": None,
            "p99": None,
            "max": None,
            "bound": bound,
            "counts": {},
        }
    mean = sum(age * count for age, count in counts.items()) / total
    extremes = {"min": min(counts), "mean": mean, "p99": quantile(counts, 0.99), "max": max(counts)}
    return {"count": total, **extremes, "bound": bound, "counts": by_age(counts)}


def _replay(replay: ReplayStatistics) -> Row:
    return {
        "items": replay.items
        if replay.shards
        else None,  # nobody knows how many those hold that are not up
        "capacity": replay.limits.capacity,
        "inserted": replay.inserts,
        "drawn": replay.drawn,
        "trained": replay.trained,
        "discarded": dict(replay.discarded),
        "samples_per_insert": replay.samples_per_insert,
        "samples_per_insert_target": replay.samples_per_insert_target,
    }


@contextlib.asynccontextmanager
async def recorded(run: RunControl) -> AsyncIterator[None]:
    """Record ``run`` in its directory while the context is open, its end included. Nothing that
    goes wrong here reaches the run.
    """
    feeding = sinks.outlets(
        run.config, SinkRun(run.id, run.directory, json_ready(run.config.model_dump(mode="json")))
    )
    recorder = Recorder(run=run, file=HistoryFile(run.directory / NAME), outlets=feeding)
    recorder.count()  # so that the first increase is seen
    task = asyncio.get_running_loop().create_task(recorder.run(), name="history")
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
